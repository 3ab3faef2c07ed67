"""PipeBuffer: a producer's and a consumer's lookup buffer, connected by one pipe, without Redis.

It provides what vLLM's first lookup buffer did (`insert`, and `drop_select` by tokens and region of
interest), on a pipe of any scheme. An item stays at the producer, within the pipe's byte budget,
until it is requested. It is found by exactly its tokens, in any order, by any number of threads at
once.

It runs on the caller's threads, and uses only the contract of `KVPipe`.
"""

import hashlib
from typing import Final

from lookup_buffer.codec import Tensor, Value, packed, unpacked
from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.pipes.pipe import ANY_KEY, TIMEOUT_SECONDS, KVPipe

PARTS: Final = 5


class PipeBuffer:
    """One end; both ends can insert and select. Thread-safe.

    It owns the pipe from now on: nothing else may send or receive under a key. Errors are those of
    `KVPipe`. On a full pipe an insert waits, then raises BufferFull. An item larger than the whole
    budget raises TensorTooLarge at once. When the consumer dies, the pipe ends, and items that it
    did not request are lost.
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
            roi: the region of interest, which of them are the key: shape [tokens], bool.
            key, value, hidden: any tensors, or None.
            timeout: seconds to wait for room.

        Several items under the same tokens are a FIFO.
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

        With None for both arguments: the oldest item. Waits up to `timeout` seconds for it to be
        inserted.

        Raises:
            LookupTimeout: it was not inserted in time.
            ConfigError: only one of the two arguments is None.
            ProtocolError: the other end sent something else than an item.
        """
        if input_tokens is not None and roi is not None:
            item = self._pipe.recv_tensor(name_of(input_tokens, roi), timeout=timeout)
        elif input_tokens is None and roi is None:
            item = self._pipe.recv_tensor(ANY_KEY, timeout=timeout)
        else:
            raise ConfigError("tokens and region of interest are both given, or both None")
        parts = [] if item is None else unpacked(item)
        if len(parts) != PARTS:
            raise ProtocolError("the other end of the pipe sent no item of a lookup buffer")
        return parts

    def close(self) -> None:
        """Idempotent; see `KVPipe.close`."""
        self._pipe.close()


def name_of(input_tokens: Tensor, roi: Tensor) -> str:
    """The pipe key of an item: a hash of its tokens in the region of interest, in their order."""
    tokens = input_tokens[roi.bool()].long().cpu().contiguous()
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=32).hexdigest()
