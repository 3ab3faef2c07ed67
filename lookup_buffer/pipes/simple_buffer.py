"""Joined: a producer's and a consumer's lookup buffer with one pipe between them, and no Redis.

What vLLM's first lookup buffer was (`insert`, `drop_select` by tokens and region of interest), on a
pipe of any scheme. An item waits at the producer, within the pipe's byte budget, until it is asked
for; it is found by exactly its tokens, in any order, by any number of threads at once.
"""

import hashlib
from typing import Final

from lookup_buffer.codec import Tensor, Value, packed, unpacked
from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.pipes.pipe import ANY_KEY, TIMEOUT_SECONDS, KVPipe

PARTS: Final = 5


class JoinedBuffer:
    """One end; either inserts and selects. Thread-safe.

    The pipe is its own from now on: nobody else sends or receives under a key. Errors are those of
    `KVPipe`. A full pipe is a wait, then BufferFull; an item larger than all of it TensorTooLarge,
    at once. When the consumer dies, what it did not ask for dies with the pipe.
    """

    def __init__(self, pipe: KVPipe) -> None:
        self._pipe = pipe

    def insert(
        self,
        input_tokens: Tensor,
        roi: Tensor,
        key: Value,
        value: Value,
        hidden: Value,
        *,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        """Store `[input_tokens, roi, key, value, hidden]` under `input_tokens[roi]`.

        Args:
            input_tokens: token ids, shape [tokens], of an integer dtype.
            roi: which of them count, shape [tokens], bool.
            key, value, hidden: any tensors, or None.
            timeout: seconds to wait for room.

        A second item under the same tokens comes behind the first.
        """
        item = packed([input_tokens, roi, key, value, hidden])
        self._pipe.send_tensor(item, name_of(input_tokens, roi), timeout=timeout)

    def drop_select(
        self,
        input_tokens: Tensor | None,
        roi: Tensor | None,
        *,
        timeout: float = TIMEOUT_SECONDS,
    ) -> list[Value]:
        """Take the item with exactly these tokens out of the other end's buffer, as five values.

        None for both: the oldest. Waits up to `timeout` seconds for it to be inserted.

        Raises:
            LookupTimeout: it was not.
        """
        if input_tokens is not None and roi is not None:
            item = self._pipe.recv_tensor(name_of(input_tokens, roi), timeout=timeout)
        elif input_tokens is None and roi is None:
            item = self._pipe.recv_tensor(ANY_KEY, timeout=timeout)
        else:
            raise ConfigError("tokens and region of interest are both given, or both None")
        parts = [] if item is None else unpacked(item)
        if len(parts) != PARTS:
            raise ProtocolError("the other end of the pipe is no lookup buffer")
        return parts

    def close(self) -> None:
        """Idempotent; see `KVPipe.close`."""
        self._pipe.close()


def name_of(input_tokens: Tensor, roi: Tensor) -> str:
    """What an item is found by: its tokens that count, exactly, in their order and number."""
    tokens = input_tokens[roi.bool()].long().cpu().contiguous()
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=32).hexdigest()
