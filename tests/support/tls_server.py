"""A Redis 7.0 of Debian that speaks TLS only, wants a client certificate, and has a user for us.

The wheel's server has no TLS, so tests of it are skipped where the machine has no redis-server.

Its certificates come from an authority for tests, which signs for a server and for a client of this
machine.
"""

import datetime
import ipaddress
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from servers import QUIET, ServerProcess, free_ports, redis_executable


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, and certificate and key of server and client."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(directory: Path) -> Certificates:
    """Valid for a day, for 127.0.0.1 and localhost."""
    directory.mkdir(parents=True, exist_ok=True)
    files = Certificates(*(directory / f"{name}.pem" for name in Certificates.__annotations__))
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _sign("authority", authority_key, "authority", authority_key)
    files.authority.write_bytes(_pem(authority))
    for name, path, key_path in (
        ("server", files.server, files.server_key),
        ("client", files.client, files.client_key),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        path.write_bytes(_pem(_sign(name, key, "authority", authority_key)))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return files


def _sign(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .add_extension(x509.BasicConstraints(subject == issuer, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_identifier, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "redis-keys.md"
USER, PASSWORD = "lookup-buffer", "p@ss/word"
ADMIN_PASSWORD = "of-the-administrator"


class TlsServer:
    """`url` is for open_store, as the documented user; `admin` gives all rights to tests."""

    def __init__(self, program: str, directory: Path, files: Certificates) -> None:
        self.files = files
        (port,) = free_ports(1)
        self.process = ServerProcess(
            program,
            directory,
            port,
            [
                "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1",
                "--tls-cert-file", str(files.server), "--tls-key-file", str(files.server_key),
                "--tls-ca-cert-file", str(files.authority), "--tls-auth-clients", "yes",
                "--requirepass", ADMIN_PASSWORD, *QUIET,
            ],
            tls=client_context(files),
        )  # fmt: skip
        assert self.admin("ACL", "SETUSER", USER, *user_rule(PASSWORD)) == b"OK"

    @property
    def url(self) -> str:
        return self.url_of()

    def url_of(
        self, *, user: str = USER, password: str = PASSWORD, certificate: bool = True
    ) -> str:
        """The URL of another user, or without the certificate that the server wants."""
        options = f"ssl_ca_certs={quote(str(self.files.authority))}"
        if certificate:
            options += f"&ssl_certfile={quote(str(self.files.client))}"
            options += f"&ssl_keyfile={quote(str(self.files.client_key))}"
        secret = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"rediss://{secret}@127.0.0.1:{self.process.port}?{options}"

    def admin(self, *parts: str | bytes | int) -> object:
        """The reply to one command of somebody who may do everything."""
        with self.process.connect() as connection:
            connection("AUTH", ADMIN_PASSWORD)
            return connection(*parts)


def user_rule(password: str) -> list[str]:
    """The words behind `ACL SETUSER lookup-buffer`, as docs/redis-keys.md gives them."""
    match = re.search(r"^ACL SETUSER lookup-buffer (.+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert match, "the document gives no ACL rule"
    return match[1].replace("PASSWORD", password).split()


def client_context(files: Certificates) -> ssl.SSLContext:
    """What a client has that the server lets in."""
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.client, files.client_key)
    return context


@pytest.fixture(scope="session")
def shared_tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """Take `tls_server`, which is this one, empty."""
    program = redis_executable()
    directory = tmp_path_factory.mktemp("tls")
    server = TlsServer(program, directory, make_certificates(directory / "certificates"))
    yield server
    server.process.kill()


@pytest.fixture
def tls_server(shared_tls_server: TlsServer) -> TlsServer:
    """Empty, and with the documented user."""
    shared_tls_server.admin("FLUSHALL")
    return shared_tls_server
