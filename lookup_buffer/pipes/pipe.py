"""KVPipe, the contract of all pipes, and `open_pipe`, which opens one by its address.

The interface is that of vLLM's first `KVPipeBase` (`send_tensor`, `recv_tensor`, `close`), with the
`key` that its authors noted was missing. Code written for that interface runs unchanged.

The scheme of an address names the module, which is imported on first use. This module has no
thread and no transport of its own.
"""

import enum
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from lookup_buffer.codec import Tensor, Value
from lookup_buffer.config import check_token_of
from lookup_buffer.errors import ConfigError, InvalidKey, TensorTooLarge
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey
from store import redact

TIMEOUT_SECONDS: Final = 300.0
"""The default timeout of an operation: that of the store of vLLM's first pipe."""
OPEN_SECONDS: Final = 30.0
MESSAGE_BYTES: Final = 1024
"""Least cost of a message in the budget, also of an empty one: the memory of its bookkeeping."""


SCHEMES: Final[Mapping[str, str]] = {
    "inproc": "inproc://NAME, between threads of a process",
    "shm": "shm:///PATH, between processes of a host",
    "tcp": "tcp://HOST:PORT, between hosts",
    "redis": "redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]?pipe=NAME, through a database",
    "rediss": "the same with rediss (TLS)",
    "valkey": "valkey",
    "valkeys": "valkeys (TLS)",
    "unix": "unix:///SOCKET?pipe=NAME, through a database on this host",
    "gloo": "gloo://HOST:PORT, between hosts, large payload by Gloo",
    "nccl": "nccl://HOST:PORT[?device=cuda:N], between GPUs, large payload by NCCL",
}
_MODULES: Final = dict.fromkeys(("rediss", "valkey", "valkeys", "unix"), "redis")
"""Modules of the schemes whose module has another name."""


class Any(enum.Enum):
    """`recv_tensor(ANY_KEY)` takes the oldest message under any key."""

    KEY = enum.auto()


ANY_KEY: Final = Any.KEY


@dataclass(frozen=True, slots=True)
class PipeLimits:
    """The budgets and deadlines of a pipe."""

    buffer_bytes: int = 1_000_000_000
    """Bound on the bytes that this end has sent and the other end has not received. At the bound a
    sender waits for room."""
    message_bytes: int | None = None
    """The largest message that this end receives. A larger one raises TensorTooLarge at its
    receiver, before memory is allocated for it, and is then dropped. None: `buffer_bytes`, so with
    the same limits at both ends no message is too large."""
    inbox_bytes: int | None = None
    """Bound on the unreceived data of each remote end: keys, and the bytes of messages up to 64
    KiB (larger ones are sent on request), at least 1 KiB a message. An end that sends more is
    disconnected (ProtocolError); an end that keeps to its budget never does. None: twice
    `buffer_bytes`, and 1 MiB at the least. It must be more than the `buffer_bytes` of the other
    end."""
    silence_seconds: float = 10.0
    """A remote end that sends nothing for so long is lost: it was stopped, or the network is down.
    Each end sends a beat twice a second. At least 2 s. A process that holds Python's interpreter
    lock for longer counts as stopped.
    """
    linger_seconds: float = 5.0
    """How long `close` waits until the other end has received what was sent."""

    def __post_init__(self) -> None:
        least = {
            "buffer_bytes": 1, "message_bytes": 0, "inbox_bytes": 1,
            "silence_seconds": 2.0, "linger_seconds": 0.0,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ConfigError(f"{name} of a pipe is {value!r}; allowed is {bound} or more")

    def cost(self, nbytes: int) -> int:
        """Cost of a message of so many bytes in the budget; more than the whole budget if it is too
        large."""
        if nbytes > self.buffer_bytes:
            return nbytes
        return min(max(nbytes, MESSAGE_BYTES), self.buffer_bytes)

    def check_received(self, nbytes: int) -> None:
        """Raises TensorTooLarge: the message is larger than this end receives."""
        most = self.buffer_bytes if self.message_bytes is None else self.message_bytes
        if nbytes > most:
            raise TensorTooLarge(
                f"a message of {nbytes} bytes was dropped: this end receives at most {most}; raise "
                "message_bytes of its PipeLimits"
            )

    @property
    def inbox_most_bytes(self) -> int:
        most = max(2 * self.buffer_bytes, 1 << 20)
        return most if self.inbox_bytes is None else self.inbox_bytes


class KVPipe(ABC):
    """One end of a pipe. Both ends send and receive; any thread may, at any time.

    Messages without a key are a FIFO. Messages with a key are received by it, in any order; several
    under one key are a FIFO among themselves. Messages without a key and messages under different
    keys never wait for each other. `None` is a message.

    Errors of the operations, after which the pipe is as before:
        LookupTimeout: no message arrived within the given time.
        BufferFull: the other end received too little within the given time.
        TensorTooLarge: larger than the whole budget, raised at once; or larger than this end
            receives.
        CodecError, InvalidKey: this value cannot be sent, or not be received so. Nothing was sent.
    Errors after which the pipe cannot be used any more; current and later callers get them:
        Closed: this end was closed.
        PipeClosed: the other end was closed, and all that it sent was received.
        PipeBroken: the other end died, or this one was aborted; data in flight is lost.
        PipeTimeout: the other end sent nothing for `silence_seconds`, or did not move the bytes of
            a transfer.
        ProtocolError: the other end violated this protocol, or sent more than `inbox_bytes`.
    A listening end serves several connecting ends: it receives from all, and ends with the last. It
    can send only while exactly one remote end is connected. Without one it waits, or raises the
    error with which the last one ended. With several it raises ConfigError.
    """

    uri: str
    """The address to which the other end connects."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of the budget in use: 0 when all that this end sent was received or given up."""

    @abstractmethod
    def send_tensor(
        self, tensor: Value, key: str | TensorKey | None = None, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """Send a tensor (any dtype, shape, strides; bit for bit), or None.

        On return the caller may change the tensor: its bytes were copied, or received. Waits at
        most `timeout` seconds for room in the budget. During that wait the other end can already
        see the message. If it requests this message, the bytes are sent directly from the caller's
        tensor. So a full budget never keeps a receiver from the key that it waits for.
        """

    @abstractmethod
    def recv_tensor(
        self,
        key: str | TensorKey | Any | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        out: Tensor | None = None,
    ) -> Value:
        """The next message without a key, or the next one under `key`, as a CPU tensor.

        `ANY_KEY` returns the oldest message that has a key. `timeout` bounds the wait for the
        message to appear; a transfer in progress gets additional time by its size. A message that
        is not received in time is not lost.

        `out` is filled and returned: a contiguous tensor of the message's dtype and shape, on the
        device that this end receives to. Receiving into memory that was used before is several
        times as fast as into a new tensor. If the message does not fit `out`, it stays in the pipe
        (CodecError). A None leaves `out` unchanged. After any other error the content of `out` is
        unspecified, but is not written to any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Close in order: waits at most `linger_seconds` until the other end has received what was
        sent. Waiting callers of this end get Closed. Idempotent; any thread."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once; data in flight is lost. Idempotent; any thread; never waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()  # the other end must not take an incomplete stream for a complete one


def open_pipe(
    uri: str,
    *,
    listen: bool = False,
    timeout: float = OPEN_SECONDS,
    token: str | None = None,
    limits: PipeLimits | None = None,
) -> KVPipe:
    """Open one end of the pipe at `uri`; one end listens, the other (or several) connect.

    A listening end returns at once. If the address has port 0, `pipe.uri` names the actual port. A
    connecting end waits up to `timeout` seconds for the other one to listen.

    Args:
        token: the secret, the same at both ends; see `protocol.auth.connect`. At least 16
            characters; required to listen beyond loopback. Not for `inproc`.

    Raises:
        ConfigError: the address is not one of `SCHEMES`, or it needs another token.
        PipeTimeout: no end listens there within the time.
        PipeError: see `KVPipe`.
        NodeRefused: the other end has another token or version.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES or not rest:
        allowed = "; ".join(SCHEMES.values())
        shown = redact(uri) if "@" in uri else uri
        raise ConfigError(f"{shown!r} is no address of a pipe; allowed are {allowed}")
    check_token_of("a pipe", token)
    module = importlib.import_module(f"lookup_buffer.pipes.{_MODULES.get(scheme, scheme)}")
    pipe: KVPipe = module.open_end(
        uri, listen=listen, timeout=timeout, token=token, limits=limits or PipeLimits()
    )
    return pipe


def key_bytes(key: str | TensorKey | None) -> bytes | None:
    """The encoded form of a key, for transfer and lookup. Any text is valid, also text that UTF-8
    does not allow.

    Raises:
        InvalidKey: the key is not text, or too long.
    """
    if key is None:
        return None
    text = key.text if isinstance(key, TensorKey) else key
    if not isinstance(text, str):
        raise InvalidKey(
            f"a {type(key).__name__} is no key of a pipe: a key is a str or a TensorKey"
        )
    found = text.encode("utf-8", "surrogatepass")
    if len(found) > MAX_KEY_CHARACTERS:
        raise InvalidKey(f"a key of a pipe has at most {MAX_KEY_CHARACTERS} bytes")
    return found
