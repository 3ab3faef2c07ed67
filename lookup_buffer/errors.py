"""The errors that callers of the lookup buffer see.

One small tree. Foreign exceptions (sockets, msgpack, torch, Redis) are translated into it where the
I/O happens, with the cause chained. A miss is a value wherever the signature has room for one;
`MissingTensor` exists for `select`, whose `None` is a stored value.

Three questions tell the families apart: is it absent (`MissingTensor`, `LookupTimeout`), is there
no room (`BufferFull`, `TensorTooLarge`), or is something broken (the rest)? Messages never contain
a token, a password or tensor bytes.
"""

from enum import StrEnum
from typing import Literal


class MissReason(StrEnum):
    """Why a look-up returned no tensor. The values are labels of metrics and part of messages."""

    # Of a node, which counts them: docs/metrics.md.
    ABSENT = "absent"
    OWNER_DEAD = "owner_dead"
    STALE = "stale"
    CHECKSUM = "checksum"
    PEER_FAILED = "peer_failed"
    STORE_DOWN = "store_down"
    TIMEOUT = "timeout"
    NO_ROOM = "no_room"
    TAKEN = "taken"
    # Of a node to an engine, or of a client that no node answers.
    RANKS_NOT_ATTACHED = "ranks_not_attached"
    NODE_DOWN = "node_down"
    # Of an engine: docs/vllm.md.
    NAMESPACE_PENDING = "namespace_pending"
    """The weights are being hashed."""
    NAMESPACE_UNKNOWN = "namespace_unknown"
    """Nothing says which weights these are, or they changed while the engine started."""
    WEIGHTS_CHANGED = "weights_changed"
    SHAPE = "shape"
    DTYPE = "dtype"
    OVER_BUDGET = "over_budget"
    CLAIMED = "claimed"
    NO_ANSWER = "no_answer"
    NOT_SHAREABLE = "not_shareable"
    OTHER = "other"
    """A reason that this version does not know."""

    @classmethod
    def of(cls, text: str) -> "MissReason":
        """The reason that a message carries; OTHER for one of another version."""
        try:
            return cls(text)
        except ValueError:
            return cls.OTHER


MaybeMissed = MissReason | Literal[""]
"""Empty: not a miss."""


class LookupBufferError(Exception):
    """The base of every error this package raises on purpose."""


class InvalidKey(LookupBufferError, ValueError):
    """A text that is not a key, or pieces that cannot form one."""


class ConfigError(LookupBufferError, ValueError):
    """A setting is wrong. The message names the setting, its value and what is allowed."""


class MissingTensor(LookupBufferError, KeyError):
    """Nobody alive holds a complete copy under this key."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which is wrong for a sentence.
        return Exception.__str__(self)


class LookupTimeout(LookupBufferError, TimeoutError):
    """The key did not appear within the time the caller gave."""


class BufferFull(LookupBufferError):
    """No room, and nothing could be evicted in the time given. A later try may succeed."""


class TensorTooLarge(LookupBufferError, ValueError):
    """Larger than the whole budget: no later try can succeed."""


class Closed(LookupBufferError):
    """This object was closed by its owner, perhaps while the call was waiting."""


class NodeUnavailable(LookupBufferError):
    """The node did not answer in time, or is gone. The client reconnects by itself."""


class NodeRefused(LookupBufferError):
    """The node is there and does not want us: another version, token or configuration."""


class ProtocolError(LookupBufferError):
    """Bytes that are no valid message: garbled, oversized, truncated, of a wrong type."""


class CorruptTensor(LookupBufferError):
    """The bytes arrived and are not those that were published (checksum, length, identity)."""


class CodecError(LookupBufferError, ValueError):
    """This tensor cannot be carried, or does not fit the destination given for it."""


class PipeError(LookupBufferError):
    """A connection that carries tensors failed. It is unusable from then on."""


class PipeClosed(PipeError):
    """Either end closed the connection between two messages."""


class PipeBroken(PipeError):
    """The connection ended in the middle of a message, was reset, or could not be made."""


class PipeTimeout(PipeError, TimeoutError):
    """The peer did not move its bytes before the operation's deadline."""
