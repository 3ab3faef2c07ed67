"""The errors that callers of the lookup buffer see, and the reasons of misses.

All errors have one base class. Exceptions of other packages (sockets, msgpack, torch, Redis) are
translated where the I/O happens, with the cause chained. A miss is a return value if the signature
permits one; `MissingTensor` exists for `select`, where `None` is a stored value.

There are three families: the tensor is absent (`MissingTensor`, `LookupTimeout`), there is no room
(`BufferFull`, `TensorTooLarge`), or a part failed or was misused (the rest). Messages never contain
a token, a password or tensor bytes.
"""

from enum import StrEnum
from typing import Literal


class MissReason(StrEnum):
    """Why a look-up returned no tensor. The values are labels of metrics and part of messages."""

    # From a node, which counts them: docs/metrics.md.
    ABSENT = "absent"
    OWNER_DEAD = "owner_dead"
    STALE = "stale"
    CHECKSUM = "checksum"
    PEER_FAILED = "peer_failed"
    STORE_DOWN = "store_down"
    TIMEOUT = "timeout"
    NO_ROOM = "no_room"
    TAKEN = "taken"
    BUSY = "busy"
    # From a node to an engine, or from a client that has no node.
    RANKS_NOT_ATTACHED = "ranks_not_attached"
    NODE_DOWN = "node_down"
    # From an engine: docs/vllm.md.
    NAMESPACE_PENDING = "namespace_pending"
    """The weights are being hashed."""
    NAMESPACE_UNKNOWN = "namespace_unknown"
    """The weights cannot be identified, or they changed while the engine started."""
    WEIGHTS_CHANGED = "weights_changed"
    SHAPE = "shape"
    DTYPE = "dtype"
    OVER_BUDGET = "over_budget"
    CLAIMED = "claimed"
    NO_ANSWER = "no_answer"
    NOT_SHAREABLE = "not_shareable"
    OTHER = "other"
    """A reason of another version."""

    @classmethod
    def of(cls, text: str) -> "MissReason":
        """The reason in a message; OTHER for one of another version."""
        try:
            return cls(text)
        except ValueError:
            return cls.OTHER


MaybeMissed = MissReason | Literal[""]
"""Empty: not a miss."""


class LookupBufferError(Exception):
    """The base of every error this package raises on purpose."""


class InvalidKey(LookupBufferError, ValueError):
    """A text that is not a key, or pieces that do not form one."""


class ConfigError(LookupBufferError, ValueError):
    """A setting is wrong. The message names the setting, its value and what is allowed."""


class MissingTensor(LookupBufferError, KeyError):
    """No live node holds a complete copy under this key."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, but the argument is a sentence.
        return Exception.__str__(self)


class LookupTimeout(LookupBufferError, TimeoutError):
    """The key did not appear within the time the caller gave."""


class BufferFull(LookupBufferError):
    """No room, and nothing could be evicted in the time given; or this client holds as much of the
    node as one may (docs/security.md). A later try may succeed."""


class TensorTooLarge(LookupBufferError, ValueError):
    """Larger than the whole arena, or for a hand-off than its half: no later try can succeed."""


class Closed(LookupBufferError):
    """The program closed this object, perhaps during the call. What only prefetches is then a miss
    (`node_down`), and a claim of several keys FAILED."""


class NodeUnavailable(LookupBufferError):
    """The node did not answer in time, or ended. The client reconnects by itself."""


class NodeRefused(LookupBufferError):
    """The node refuses the client: another version, token or configuration."""


class ReadOnly(LookupBufferError):
    """The node only reads (setting `read_only`): it stores, takes and claims nothing."""


class ProtocolError(LookupBufferError):
    """Bytes that are not a valid message: garbled, oversized, truncated, or of a wrong type."""


class CorruptTensor(LookupBufferError):
    """The received bytes differ from the published ones (checksum, length, identity)."""


class CodecError(LookupBufferError, ValueError):
    """The tensor is of an unsupported kind, or does not fit the destination given for it."""


class PipeError(LookupBufferError):
    """A connection that carries tensors failed. It is unusable from then on."""


class PipeClosed(PipeError):
    """Either end closed the connection between two messages."""


class PipeBroken(PipeError):
    """The connection ended in the middle of a message, was reset, or could not be made."""


class PipeTimeout(PipeError, TimeoutError):
    """The remote end did not move its bytes before the operation's deadline."""
