"""`LookupBufferKVConnectorV0`: the first interface of vLLM's KV connectors, on the lookup buffer.

For hosts that drive prefill batches with a slot mapping; see `kv_host`. Chunks of each sequence are
stored under exact keys, for any number of consumers: their KV, and beside it the hidden states. A
consumer takes what there is, up to the first gap, and leaves the rest to its model. Nothing waits
for what is not there.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from connectors.kv_host import KvCaches, KVConnectorBase, ModelInput
from connectors.paged import gather_slots, scatter_slots, slots_of
from lookup_buffer.client import LookupBuffer
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

CHUNK_TOKENS: Final = 16
KV_PART, HIDDEN_PART = "kv", "hidden"


@dataclass(frozen=True, slots=True)
class FirstConfig:
    """What the host says of itself, for hosts without a configuration of vLLM's."""

    buffer: "BufferConfig"
    namespace: Namespace
    """Names model, weights and dtype; ranks and the cache's layout are added."""
    heads: int
    head_size: int
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One sequence of a prefill batch."""

    tokens: list[int]
    """Those of the batch, none of earlier ones."""
    start: int
    """Where they are in the batch."""
    slots: torch.Tensor

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of its chunks, the last of which may be shorter."""
        end = len(self.tokens)
        return [(begin, min(begin + CHUNK_TOKENS, end)) for begin in range(0, end, CHUNK_TOKENS)]

    def names(self) -> list[str]:
        """Each holds all tokens up to the chunk's end."""
        link, names = b"", []
        for begin, end in self.spans:
            tokens = array("q", self.tokens[begin:end]).tobytes()
            link = hashlib.sha256(link + tokens).digest()
            names.append(link.hex())
        return names


class LookupBufferKVConnectorV0(KVConnectorBase):
    """See the module. One thread at a time, as its host's."""

    def __init__(self, rank: int, local_rank: int, config: FirstConfig) -> None:
        self._heads = config.heads
        self._head_size = config.head_size
        parts = {"rank": f"{rank} of {config.world_size}", "content": "kv_cache of a batch"}
        layout = {"heads": str(config.heads), "head_size": str(config.head_size)}
        namespace = Namespace({**config.namespace.parts, **parts, **layout})
        self._buffer = LookupBuffer(config.buffer, namespace, required=False)
        self.loaded_tokens = 0
        """Tokens whose KV was taken from others."""

    def close(self) -> None:
        self._buffer.close()

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: ModelInput,
        kv_caches: KvCaches,
        hidden_or_intermediate_states: torch.Tensor,
    ) -> None:
        keys, values = self._sides(kv_caches)
        for sequence in _fresh_sequences(model_input):
            for name, (begin, end) in zip(sequence.names(), sequence.spans, strict=True):
                slots = sequence.slots[begin:end]
                kv = torch.stack([gather_slots(keys, slots), gather_slots(values, slots)])
                start = sequence.start
                hidden = hidden_or_intermediate_states[start + begin : start + end]
                try:
                    self._buffer.insert(TensorKey(name, part=KV_PART), kv)
                    self._buffer.insert(TensorKey(name, part=HIDDEN_PART), hidden)
                except LookupBufferError:
                    break  # others compute it: never the host's concern

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KvCaches
    ) -> tuple[torch.Tensor | None, bool, ModelInput]:
        sequences = _fresh_sequences(model_input)
        found = [self._receive(sequence, kv_caches) for sequence in sequences]
        batch = sum(len(sequence.tokens) for sequence in sequences)
        complete = batch == len(model_input.input_tokens) and all(
            len(sequence.tokens) == sum(len(rows) for rows in hidden)
            for sequence, (_, hidden) in zip(sequences, found, strict=True)
        )
        if complete and sequences:
            return torch.cat([rows for _, hidden in found for rows in hidden]), True, model_input
        known = {
            sequence.start: count for sequence, (count, _) in zip(sequences, found, strict=True)
        }
        return None, False, _without(model_input, known)

    def _receive(self, sequence: Prefilled, kv_caches: KvCaches) -> tuple[int, list[torch.Tensor]]:
        """How many of its tokens have their KV in the cache now, and the states of the first."""
        keys, values = self._sides(kv_caches)
        count, hidden = 0, list[torch.Tensor]()
        for name, (begin, end) in zip(sequence.names(), sequence.spans, strict=True):
            kv = self._select(TensorKey(name, part=KV_PART))
            expected = (2, len(kv_caches), end - begin, self._heads, self._head_size)
            if kv is None or tuple(kv.shape) != expected or kv.dtype != kv_caches[0].dtype:
                break
            slots = sequence.slots[begin:end]
            scatter_slots(keys, slots, kv[0])
            scatter_slots(values, slots, kv[1])
            rows = self._select(TensorKey(name, part=HIDDEN_PART))
            if rows is not None and len(rows) == end - begin and count == _rows(hidden):
                hidden.append(rows)
            count = end
        self.loaded_tokens += count
        return count, hidden

    def _select(self, key: TensorKey) -> torch.Tensor | None:
        try:
            return self._buffer.select(key)
        except LookupBufferError:
            return None

    def _sides(self, kv_caches: KvCaches) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of each layer, by slots."""
        keys, values = (
            [slots_of(cache[side], self._heads, self._head_size) for cache in kv_caches]
            for side in (0, 1)
        )
        return keys, values


def _rows(hidden: Sequence[torch.Tensor]) -> int:
    return sum(len(rows) for rows in hidden)


def _fresh_sequences(model_input: ModelInput) -> list[Prefilled]:
    """The sequences that this batch prefills from their first token on. What another batch began
    cannot be named by the tokens that are here, and what decodes is not prefilled."""
    metadata = model_input.attn_metadata
    sequences, start = [], 0
    for length, context in zip(metadata.seq_lens, metadata.context_lens, strict=True):
        end = start + length - context
        if end > metadata.num_prefill_tokens:
            break
        if context == 0:
            tokens = model_input.input_tokens[start:end].tolist()
            sequences.append(Prefilled(tokens, start, metadata.slot_mapping[start:end]))
        start = end
    return sequences


def _without(model_input: ModelInput, known: dict[int, int]) -> ModelInput:
    """The same batch without the tokens whose KV is in the cache; of each sequence one token at
    least is left, for its states are wanted."""
    if not any(known.values()):
        return model_input
    metadata = model_input.attn_metadata
    kept: list[int] = []
    contexts, start = [], 0
    for length, context in zip(metadata.seq_lens, metadata.context_lens, strict=True):
        end = start + length - context
        skipped = min(known.get(start, 0), end - start - 1)
        kept += range(start + skipped, end)
        contexts.append(context + skipped)
        start = end
    prefill = sum(index < metadata.num_prefill_tokens for index in kept)
    return _Input(
        model_input.input_tokens[kept],
        _Metadata(metadata.seq_lens, metadata.slot_mapping[kept], prefill, contexts),
    )


@dataclass(frozen=True, slots=True)
class _Metadata:
    seq_lens: Sequence[int]
    slot_mapping: torch.Tensor
    num_prefill_tokens: int
    context_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Input:
    input_tokens: torch.Tensor
    attn_metadata: Any
