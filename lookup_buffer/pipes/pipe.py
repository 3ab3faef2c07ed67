"""KVPipe: the contract of all pipes.

The interface of vLLM's first `KVPipeBase` (`send_tensor`, `recv_tensor`, `close`), with the `key`
that its authors noted was missing. Code written for that one runs unchanged.

From an address to a pipe: the scheme names the module, which is imported on its first use.
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
"""Of an operation that names none; as long as vLLM's first pipe waited for its store."""
MESSAGE_BYTES: Final = 1024
"""What a message costs of the budget at the least: so much is kept of each, also of no bytes."""


class Any(enum.Enum):
    """`recv_tensor(ANY_KEY)` takes the oldest message under any key."""

    KEY = enum.auto()


ANY_KEY: Final = Any.KEY


@dataclass(frozen=True, slots=True)
class PipeLimits:
    """How much a pipe holds, and how long it is patient."""

    buffer_bytes: int = 1_000_000_000
    """Bytes that this end has sent and the other one has not received. A sender waits for room."""
    message_bytes: int | None = None
    """The largest message that this end receives. Of a larger one its receiver is told, before
    there is memory for it, and then it is gone. None: `buffer_bytes`, so with the same limits at
    both ends nothing is larger."""
    inbox_bytes: int | None = None
    """What each other end may have sent here that was not received: keys, and the bytes of messages
    up to 64 KiB (larger ones are asked for), at least 1 KiB a message. Who sends more is lost
    (ProtocolError): ends that keep to their budget do not. None: twice `buffer_bytes`, and 1 MiB
    at the least; it has to be more than the `buffer_bytes` of the other end."""
    silence_seconds: float = 10.0
    """A peer that says nothing for so long is lost: stopped, or cut off. It beats twice a second.
    At least 2 s; who holds Python's interpreter lock for longer looks like one that was stopped.
    """
    linger_seconds: float = 5.0
    """How long `close` waits for the peer to receive what it was sent."""

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
        """What a message of so many bytes takes of the budget; more than all of it if too large."""
        if nbytes > self.buffer_bytes:
            return nbytes
        return min(max(nbytes, MESSAGE_BYTES), self.buffer_bytes)

    def check_received(self, nbytes: int) -> None:
        """Raises TensorTooLarge: this end receives no such message."""
        most = self.buffer_bytes if self.message_bytes is None else self.message_bytes
        if nbytes > most:
            raise TensorTooLarge(
                f"a message of {nbytes} bytes was sent, and is dropped: this end receives at most "
                f"{most}; raise message_bytes of its PipeLimits"
            )

    @property
    def inbox_most_bytes(self) -> int:
        most = max(2 * self.buffer_bytes, 1 << 20)
        return most if self.inbox_bytes is None else self.inbox_bytes


class KVPipe(ABC):
    """One end. Both ends send and receive; any thread may, at any time.

    Without a key messages are a FIFO. Under a key they are found by it, in any order; several
    under one key are a FIFO among themselves. Messages without a key and under different keys
    never wait for each other. `None` is a message.

    Errors of the operations, after which the pipe is as before:
        LookupTimeout: nothing came within the time that was given.
        BufferFull: the other end received too little within it.
        TensorTooLarge: more than the whole budget, said at once; or than this end receives.
        CodecError, InvalidKey: this cannot be carried, or not be received so. Nothing was sent.
    After which it is of no use any more, to anybody who waits or comes later:
        Closed: this end was closed.
        PipeClosed: the other end was closed, and all that it sent was received.
        PipeBroken: the other end died, or this one was aborted; what was under way is lost.
        PipeTimeout: the other end did not say anything for `silence_seconds`, or did not move a
            transfer's bytes.
        ProtocolError: what the other end said is no pipe's, or more than `inbox_bytes`.
    An end that listens serves several that connect: it receives from all, and ends with the last.
    It can send only while it has exactly one peer (else PipeClosed says so, or it waits for one).
    """

    uri: str
    """Where the other end connects to."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What of the budget is taken: 0 when all that this end sent was received, or given up."""

    @abstractmethod
    def send_tensor(
        self, tensor: Value, key: str | TensorKey | None = None, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """Send a tensor (any dtype, shape, strides; bit for bit), or None.

        On return the tensor may be changed: its bytes were copied, or are received. Waits at most
        `timeout` seconds for room in the budget. While it waits the other end can already see the
        message, and takes its bytes from the caller's tensor if it wants just this one: a full
        budget never keeps a receiver from the key that it waits for.
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

        `ANY_KEY` is the oldest of those that have one.
        `timeout` bounds the wait for it to appear; a transfer that has begun is given the time
        that its size takes on top. A message that is not taken in time is not lost.

        `out` is filled and returned: a contiguous tensor of the message's dtype and shape, where
        this end receives to. Into memory that was touched before the bytes come several times as
        fast as into a new tensor. A message that it does not fit stays where it is (CodecError); a
        None leaves it as it is. After another error its content is unspecified, and final.
        """

    @abstractmethod
    def close(self) -> None:
        """End in order: what was sent is received, within `linger_seconds`. Wakes all waiters of
        this end, who get Closed. Idempotent; any thread."""

    @abstractmethod
    def abort(self) -> None:
        """End at once; what is under way is lost. Idempotent; any thread; never waits."""

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
            self.abort()  # the other end must not take what there is for all there was to be


def key_bytes(key: str | TensorKey | None) -> bytes | None:
    """How a key travels, and is looked up: any text is one, also what UTF-8 does not allow.

    Raises:
        InvalidKey: it is no text, or too long.
    """
    if key is None:
        return None
    text = key.text if isinstance(key, TensorKey) else key
    if not isinstance(text, str):
        raise InvalidKey(f"a {type(key).__name__} is no key of a pipe")
    found = text.encode("utf-8", "surrogatepass")
    if len(found) > MAX_KEY_CHARACTERS:
        raise InvalidKey(f"a key of a pipe has at most {MAX_KEY_CHARACTERS} bytes")
    return found


SCHEMES: Final[Mapping[str, str]] = {
    "inproc": "inproc://NAME, between threads of a process",
    "shm": "shm:///PATH, between processes of a host",
    "tcp": "tcp://HOST:PORT, between hosts",
    "redis": "redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]?pipe=NAME, by way of a database",
    "rediss": "the same with rediss (TLS)",
    "valkey": "valkey",
    "valkeys": "valkeys (TLS)",
    "unix": "unix:///SOCKET?pipe=NAME, by way of a database on this host",
    "gloo": "gloo://HOST:PORT, between hosts, large payload by Gloo",
    "nccl": "nccl://HOST:PORT[?device=cuda:N], between GPUs, large payload by NCCL",
}
_MODULES: Final = dict.fromkeys(("rediss", "valkey", "valkeys", "unix"), "redis")
"""Of those schemes whose module has another name."""
OPEN_SECONDS: Final = 30.0


def open_pipe(
    uri: str,
    *,
    listen: bool = False,
    timeout: float = OPEN_SECONDS,
    token: str | None = None,
    limits: PipeLimits | None = None,
) -> KVPipe:
    """One end of the pipe at `uri`; one end listens, the other (or several) connect.

    A listening end returns at once; where it was given port 0, `pipe.uri` says which it got. A
    connecting end waits up to `timeout` seconds for the other one to listen.

    Args:
        token: both ends must know the same; see `link.connect`. At least 16 characters; needed to
            listen beyond loopback. Not for `inproc`.

    Raises:
        ConfigError: the address is not one of `SCHEMES`, or it needs another token.
        PipeTimeout: nobody listens there within the time.
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
