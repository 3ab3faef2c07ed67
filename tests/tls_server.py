"""A Redis 7.0 of Debian that speaks TLS only, wants a client certificate, and has a user for us.

The wheel's server has no TLS, so tests of it are skipped where the machine has no redis-server.
"""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from certificates import Certificates, make_certificates
from ports import free_ports
from server_process import QUIET, ServerProcess
from servers import redis_executable

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "redis-keys.md"
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
