"""Mutual TLS between nodes: contexts from files that may change, and sockets for two threads.

`Tls` has what a node proves itself with, and by whom others must be certified: for the files of
`BufferConfig`. A certificate names its node, so a certified node can pose as no other. One with the
name READER, too, is that of a node that only reads. TLS 1.3 only. `TlsSocket` takes the place of a
plain socket in all code above. `Trust` says how long a connection's certificate counts after its
handshake, which OpenSSL does not ask again. Contexts are used on the loop's thread; for those of
sockets see there.
"""

import errno
import hashlib
import logging
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from lookup_buffer.config import TLS_FILES, TlsFiles
from lookup_buffer.errors import ConfigError, NodeRefused
from lookup_buffer.protocol.handshakes import Handshakes
from store.tls import TlsOptionError, file_stamp, tls_context

RECORD_BYTES: Final = 16 << 10
"""Of one record."""
SEND_BYTES: Final = 4 * RECORD_BYTES
"""Of one send. With one record each, transfers were 15 % slower."""
PIECE_BYTES: Final = 17 << 10
"""Of what has come, as OpenSSL gets it. No record is longer. 640 changes of keys fit, which take it
14 ms."""
THREADS_PIECE_BYTES: Final = 256 << 10
"""The same on a thread that waits for as much: in small pieces it takes 1.5 times as long."""
WITHOUT_DATA_MAX: Final = 32 << 10
"""Of a handshake, or of records without data. A handshake with three certificates has 8 KiB."""
ACCEPTED_AT_ONCE: Final = 8
DIALLED_AT_ONCE: Final = 16
OF_ONE_AT_ONCE: Final = 2
"""Calls of OpenSSL in handshakes: an honest one takes 1 ms."""
_SETTINGS: Final = dict(
    zip(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), TLS_FILES, strict=True)
)
_TIMEVAL: Final = struct.Struct("@ll")
_NAMES: Final = ("DNS", "URI")
READER: Final = "lookup-buffer:reader"
"""A URI name in the certificate of a node that only reads. No node has such an id."""
EXCLUDED_SECONDS: Final = 60.0
"""So long after a certificate has ceased to count, connections by it are ended, whatever they do.
Until then other nodes have time to replace theirs, and hand-offs to be acknowledged."""
_log = logging.getLogger(__name__)

T = TypeVar("T")


class TlsSocket(socket.socket):
    """A TLS connection with the methods and meanings of a plain socket that this package uses.

    So one thread may send while another receives, and MSG_DONTWAIT, SO_RCVTIMEO and SO_SNDTIMEO
    count. OpenSSL serves one thread at a time: its calls are made by turns and never wait; who has
    to wait does so outside of them. What a send could not send is repeated by the next one, which
    begins with the same bytes and is not shorter.

    OpenSSL gets what has come in pieces. From a socket it would read for as long as something comes
    that has no data in it: a handshake in records of one byte, or changes of keys. A call here
    takes one such piece, and a connection with more than WITHOUT_DATA_MAX of them is ended.

    `dup` returns the same object, which the last `close` closes.
    """

    def __init__(
        self, stream: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        """Takes the descriptor of `stream`, newly connected."""
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=server_side)
        super().__init__(stream.family, stream.type, stream.proto, fileno=stream.detach())
        super().setblocking(False)
        self._turn = _Turn()
        self._waits = False
        self._seconds = {socket.SO_RCVTIMEO: math.inf, socket.SO_SNDTIMEO: math.inf}
        self._without_data = 0
        """Bytes received since the last data."""
        self._has_ended = False
        self._unsent = memoryview(b"")
        """Of the records of the send that is to be repeated."""
        self._unsent_of = 0
        """How many bytes of data they have."""
        self._owners = 1
        self._counting = threading.Lock()

    contexts: "_Contexts"
    """What it was made with; of a socket that `Tls` has made."""

    def shake_hands(self, timeout: float) -> None:
        """The handshake of TLS on the caller's thread, in so many seconds.

        Raises:
            OSError: it failed; BlockingIOError: it took too long.
        """
        self._waits, until = True, time.monotonic() + timeout
        while event := self.go_on():
            self._wait(event, until - time.monotonic())

    def go_on(self) -> int:
        """Go on with the handshake, by what has come. Not on a loop's thread: see `handshakes`.

        Returns:
            The event of `select.poll` to wait for before the next call; 0: it is done.

        Raises:
            OSError: it failed.
        """
        with self._turn:
            try:
                self._flush()
                try:
                    self._shake()
                except ssl.SSLWantReadError:
                    self._fill(PIECE_BYTES)
                    self._shake()
            except ssl.SSLWantReadError:
                return select.POLLIN
            except ssl.SSLWantWriteError:
                return select.POLLOUT
            self._without_data = 0
            return 0

    def getpeercert(self) -> dict[str, Any]:
        """The certificate of the other end, after the handshake."""
        return dict(self._tls.getpeercert() or {})

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        memory = bytearray(buflen)
        return bytes(memory[: self.recv_into(memory, 0, flags)])

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        with memoryview(buffer) as whole, whole[: nbytes or None] as target:
            most = PIECE_BYTES
            if self._waits and not flags & socket.MSG_DONTWAIT:
                most = max(most, min(len(target), THREADS_PIECE_BYTES))
            return self._moved(partial(self._read, target, most), socket.SO_RCVTIMEO, flags)

    def recvmsg(
        self, bufsize: int, ancbufsize: int = 0, flags: int = 0
    ) -> tuple[bytes, list[Any], int, None]:
        """Descriptors cannot come: `ancbufsize` does not count."""
        return self.recv(bufsize, flags), [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends at most SEND_BYTES, which count as sent when the kernel has their records: so one
        can see that a slow receiver makes progress."""
        with memoryview(data) as whole, whole[:SEND_BYTES] as records:
            return self._moved(partial(self._write, records), socket.SO_SNDTIMEO, flags)

    def sendmsg(  # type: ignore[override]  # no address
        self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """At most what fits one record is sent."""
        together = bytearray()
        for buffer in buffers:
            together += memoryview(buffer)[: RECORD_BYTES - len(together)]
        return self.send(together, flags)

    def setsockopt(self, level: int, option: int, value: Any, *rest: Any) -> None:
        if level == socket.SOL_SOCKET and option in self._seconds:
            seconds, microseconds = _TIMEVAL.unpack(value)
            self._seconds[option] = seconds + microseconds / 1e6
        else:
            super().setsockopt(level, option, value, *rest)

    def setblocking(self, flag: bool) -> None:
        self._waits = flag  # the descriptor never blocks

    def dup(self) -> "TlsSocket":
        with self._counting:
            self._owners += 1
        return self

    def close(self) -> None:
        with self._counting:
            self._owners -= 1
            is_last = self._owners == 0
        if is_last:
            super().close()

    def _moved(self, move: Callable[[], T], option: int, flags: int = 0) -> T:
        """The result of `move`, which reads or writes. `option`: whose timeout bounds the waits for
        it."""
        until = None
        while True:
            with self._turn:
                try:
                    return move()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            if flags & socket.MSG_DONTWAIT or not self._waits:
                raise BlockingIOError(errno.EAGAIN, "TLS has to wait")
            if until is None:
                until = time.monotonic() + self._seconds[option]
            self._wait(event, until - time.monotonic())

    def _wait(self, event: int, seconds: float) -> None:
        poller = select.poll()
        poller.register(self, event)
        if not poller.poll(None if seconds == math.inf else max(0.0, seconds) * 1000):
            raise BlockingIOError(errno.EAGAIN, "the time for TLS has passed")

    # -- calls of OpenSSL, and what they need of the kernel: none waits

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            raise
        except ssl.SSLError:
            with suppress(OSError):
                self._flush()  # it says why
            raise
        self._flush()

    def _read(self, target: memoryview, most: int) -> int:
        """What OpenSSL has, or can make of one more piece of at most `most` bytes. It keeps none of
        it if `target` has room for PIECE_BYTES and a record: a selector sees only what is in the
        kernel."""
        got, has_filled = self._decrypted(target), False
        while got == 0 and len(target) and not self._has_ended:
            if has_filled:
                raise ssl.SSLWantReadError
            self._fill(most)
            got, has_filled = self._decrypted(target), True
        return got

    def _decrypted(self, target: memoryview) -> int:
        got = 0
        try:
            while got < len(target) and not self._has_ended:
                read = cast("int", self._tls.read(len(target) - got, target[got:]))
                self._has_ended = read == 0
                got += read
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLEOFError:
            self._has_ended = True
        if got:
            self._without_data = 0
        return got

    def _fill(self, most: int) -> None:
        """Give OpenSSL a piece of what the kernel has."""
        if self._without_data > WITHOUT_DATA_MAX or self._to_send.pending > WITHOUT_DATA_MAX:
            raise _Refused("too much without data")
        try:
            piece = super().recv(most)
        except (BlockingIOError, InterruptedError) as error:
            raise ssl.SSLWantReadError from error
        self._without_data += len(piece)
        if piece:
            self._received.write(piece)
        else:
            self._received.write_eof()

    def _write(self, data: memoryview) -> int:
        if not self._unsent:
            self._unsent_of = 0
            try:
                while self._unsent_of < len(data):  # a record each
                    self._unsent_of += self._tls.write(data[self._unsent_of :])
            except ssl.SSLWantReadError as error:
                raise _Refused("a part of a change of keys") from error
        self._flush()
        return self._unsent_of

    def _flush(self) -> None:
        """Give the kernel all that OpenSSL has made."""
        while True:
            if not self._unsent:
                if not self._to_send.pending:
                    return
                self._unsent = memoryview(self._to_send.read())
            try:
                self._unsent = self._unsent[super().send(self._unsent) :]
            except (BlockingIOError, InterruptedError) as error:
                raise ssl.SSLWantWriteError from error


class _Refused(ssl.SSLError):
    """What the other end sends is valid, and no honest one sends it."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPROTO, reason)
        self.reason = reason


class _Turn:
    """A lock. Who waits for it gets it before who has just had it: a thread that sends without
    pause does not keep the loop's thread waiting."""

    def __init__(self) -> None:
        self._next, self._now = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._now.acquire()

    def __exit__(self, *_: object) -> None:
        self._now.release()


@dataclass(slots=True, eq=False)
class _Contexts:
    """Of one state of the files."""

    dials: ssl.SSLContext
    accepts: ssl.SSLContext
    authorities: list[dict[str, Any]]
    """Their certificates, as `getpeercert` returns one."""
    expires: float = 0.0
    """When this node's certificate does, in seconds of the epoch."""
    authority_expires: float = 0.0
    """The same of the authority that signed it: see `_authority_expires`."""
    replaced_at: float = math.inf
    """When those of changed files took their place, by `time.monotonic`."""


class Trust(NamedTuple):
    """How long the certificate counts with which the other end of a connection proved itself. By
    default, as without TLS, for ever."""

    contexts: _Contexts | None = None
    """By which it was verified. Those of changed files may exclude it."""
    expires: float = math.inf
    """In seconds of the epoch."""

    def counts(self) -> bool:
        """Whether the connection may be used for something new."""
        return self._lapsed_seconds() < 0.0

    def is_over(self) -> bool:
        """Whether the connection has to end, whatever it does."""
        return self._lapsed_seconds() >= EXCLUDED_SECONDS

    def _lapsed_seconds(self) -> float:
        """For how long it has not counted; negative while it does."""
        replaced_at = math.inf if self.contexts is None else self.contexts.replaced_at
        return max(time.monotonic() - replaced_at, time.time() - self.expires)


class Tls:
    """TLS with other nodes, as the node `node`. The files are read again when one has changed; if
    they do not fit together then, a warning is logged and those before stay in use."""

    def __init__(self, files: TlsFiles, node: str, *, read_only: bool = False) -> None:
        """`read_only`: whether the certificate has to be that of a node that only reads.

        Raises:
            ConfigError: a file cannot be used. The message names its setting and says why.
        """
        self.node = node
        self._files = files
        self._read_only = read_only
        self.accepting = Handshakes(ACCEPTED_AT_ONCE, OF_ONE_AT_ONCE)
        """Those of the two kinds, each by the host of the other end, or by its endpoint."""
        self.dialling = Handshakes(DIALLED_AT_ONCE, OF_ONE_AT_ONCE)
        self._stamps = self._read_stamps()
        self._contexts = _contexts(files, node, read_only=read_only)

    @property
    def expires(self) -> float:
        """When this node's certificate does, in seconds of the epoch."""
        return self._contexts.expires

    @property
    def authority_expires(self) -> float:
        """When its authority's certificate does; all certificates that it signed end with it."""
        return self._contexts.authority_expires

    def dialled(self, stream: socket.socket) -> TlsSocket:
        """`stream`, newly connected, for TLS; its handshake follows. It is closed on any error."""
        contexts = self._current()
        return _wrapped(stream, contexts, contexts.dials, server_side=False)

    def accepted(self, stream: socket.socket) -> TlsSocket:
        """The accepting side of `dialled`."""
        contexts = self._current()
        return _wrapped(stream, contexts, contexts.accepts, server_side=True)

    def connected(self, stream: socket.socket, node: str, timeout: float) -> TlsSocket:
        """`stream`, newly connected to `node`, after the handshake of TLS on the caller's thread,
        in `timeout` seconds. It is closed on any error.

        Raises:
            TlsRefused: there is no TLS with the other end, or its certificate is of another node.
            OSError: the connection failed, or it took too long.
        """
        secured = self.dialled(stream)
        try:
            secured.shake_hands(timeout)
            check_names(secured, node)
        except ssl.SSLError as error:
            secured.close()
            raise TlsRefused(explained(error)) from error
        except BaseException:
            secured.close()
            raise
        return secured

    def tick(self) -> None:
        """Read changed files, also while there are no new connections: see `Trust`. To be called a
        few times a second."""
        self._current()

    def _current(self) -> _Contexts:
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                changed = _contexts(self._files, self.node, read_only=self._read_only)
            except ConfigError as error:
                _log.warning("changed files are not used until they change again: %s", error)
            else:
                self._contexts.replaced_at = time.monotonic()
                self._contexts = changed
                _log.info("the changed files of TLS are used from now on")
        return self._contexts

    def _read_stamps(self) -> list[tuple[int, ...] | None]:
        return [file_stamp(path) for path in self._files]


class TlsRefused(NodeRefused):
    """There is no TLS with the other end, or its certificate is of another node."""

    def __init__(self, why: str) -> None:
        super().__init__(f"refused: {why}")


def check_names(stream: TlsSocket, node: str) -> None:
    """Raises TlsRefused: the certificate of the other end, after the handshake, is not that of
    `node`."""
    if refusal := name_refusal(stream, node):
        raise TlsRefused(refusal)


def name_refusal(stream: TlsSocket, node: str) -> str:
    """Why the certificate of the other end is not that of `node`; empty if it is."""
    names = _names(stream.getpeercert())
    if node and node in names and node != READER:
        return ""
    return f"the certificate is of {_listed(names)}, not of {node}"


def is_reader(stream: TlsSocket) -> bool:
    """Whether the certificate of the other end is that of a node that only reads."""
    return READER in _names(stream.getpeercert())


def client_of(stream: TlsSocket) -> str:
    """Whose bounds count for a node that only reads, after the handshake: a digest of all names of
    its certificate. By one of them alone, it would have the bounds of each."""
    names = sorted(_names(stream.getpeercert()))
    return hashlib.sha256(repr(names).encode()).hexdigest()


def trust_of(stream: TlsSocket) -> Trust:
    """How long the certificate of the other end counts, after the handshake: until it expires or
    its authority does, or until the files change."""
    certificate = stream.getpeercert()
    expires = ssl.cert_time_to_seconds(certificate["notAfter"])
    by_authority = _authority_expires(stream.contexts.authorities, certificate)
    return Trust(stream.contexts, min(expires, by_authority))


def explained(error: ssl.SSLError) -> str:
    """Why TLS with the other end failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused here: {error.verify_message}"
    _, _, alert = (error.reason or "").partition("_ALERT_")
    if alert:
        return f"it ended TLS with this node: {alert.lower().replace('_', ' ')}"
    return f"no TLS with it: {(error.reason or 'the connection ended').lower().replace('_', ' ')}"


def _wrapped(
    stream: socket.socket, contexts: _Contexts, context: ssl.SSLContext, *, server_side: bool
) -> TlsSocket:
    try:
        secured = TlsSocket(stream, context, server_side=server_side)
    except BaseException:
        stream.close()
        raise
    secured.contexts = contexts
    return secured


def _contexts(files: TlsFiles, node: str, *, read_only: bool) -> _Contexts:
    """Raises ConfigError."""
    options = {
        "ssl_certfile": str(files.certificate),
        "ssl_keyfile": str(files.key),
        "ssl_ca_certs": str(files.authority),
        "ssl_check_hostname": False,  # a name is that of a node, see `check_names`
    }
    try:
        dials = tls_context(options)
    except TlsOptionError as error:
        setting = _SETTINGS.get(error.option, error.option)
        raise ConfigError(f"setting {setting!r} is {str(error.value)!r}: {error.why}") from error
    accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        accepts.load_verify_locations(files.authority)
        accepts.load_cert_chain(files.certificate, files.key, password="")
    except OSError as error:
        raise ConfigError(f"the files of TLS changed while they were read: {error}") from error
    accepts.verify_mode = ssl.CERT_REQUIRED
    accepts.num_tickets = 0  # a ticket would look like an answer that nobody requested
    dials.keylog_filename = None  # type: ignore[assignment]  # SSLKEYLOGFILE would get all keys
    for context in (dials, accepts):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    contexts = _Contexts(dials, accepts, dials.get_ca_certs())
    own = _checked_own(contexts, files, node, read_only=read_only)
    contexts.expires = ssl.cert_time_to_seconds(own["notAfter"])
    contexts.authority_expires = _authority_expires(contexts.authorities, own)
    return contexts


def _authority_expires(known: list[dict[str, Any]], certificate: dict[str, Any]) -> float:
    """When the last of those `known` expires that may have signed a certificate; or when that does,
    where the file lists only certificates that may sign none."""
    signers = [one for one in known if one["subject"] == certificate["issuer"]]
    return max(
        ssl.cert_time_to_seconds(one["notAfter"]) for one in signers or known or [certificate]
    )


def _checked_own(
    contexts: _Contexts, files: TlsFiles, node: str, *, read_only: bool
) -> dict[str, Any]:
    """This node's certificate, as `getpeercert` returns it. Its two ends meet in memory: what they
    refuse, other nodes refuse as well.

    Raises:
        ConfigError: the certificate is not of the authority, not valid now, or not of this node,
            or it is that of a reader and this node is none, or the reverse.
    """
    to_dialling, to_accepting = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = contexts.dials.wrap_bio(to_dialling, to_accepting)
    accepting = contexts.accepts.wrap_bio(to_accepting, to_dialling, server_side=True)
    setting = f"setting {TLS_FILES[0]!r} is {str(files.certificate)!r}"
    try:
        for end in (dialling, accepting, dialling, accepting):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{setting}: {error.verify_message}; allowed: a certificate that is valid now, for "
            f"servers and clients, of an authority in {files.authority}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(f"{setting}: it cannot be used for TLS 1.3: {error.reason}") from error
    certificate: dict[str, Any] = dialling.getpeercert() or {}
    names = _names(certificate)
    if node not in names:
        raise ConfigError(
            f"{setting}, which is of {_listed(names)}; allowed: one with the DNS or URI name "
            f"{node!r}, the 'node_id'"
        )
    if (READER in names) != read_only:
        has, allowed = (
            ("the", "set 'read_only'")
            if READER in names
            else ("no", "one with it, as 'read_only' is set")
        )
        raise ConfigError(f"{setting}, with {has} URI name {READER!r}; allowed: {allowed}")
    return certificate


def _names(certificate: Any) -> list[str]:
    """`certificate` as `getpeercert` returns it."""
    entries = (certificate or {}).get("subjectAltName", ())
    return [value for kind, value in entries if kind in _NAMES]


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name[:64]) for name in names[:4]) or "no DNS or URI name"
