"""Prefill batches of hosts with a slot mapping: which sequences they begin, and what is left of a
batch when some of the KV is there. Pure data; see `kv.host`."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from connectors.kv.host import OTHER_INPUTS, AttentionMetadata, ModelInput

CHUNK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One sequence that a batch prefills from its first token on."""

    tokens: list[int]
    slots: torch.Tensor
    start: int
    """Where in the batch the first token is that is there."""
    known: int = 0
    """Of its tokens, the first ones: not in the batch, for their KV came from others."""

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

    def rows(self, begin: int, end: int) -> slice:
        """Of the batch, those of its tokens from `begin` on."""
        first = self.start - self.known
        return slice(first + begin, first + end)


@dataclass(frozen=True, slots=True)
class Metadata:
    seq_lens: Sequence[int]
    slot_mapping: torch.Tensor
    num_prefill_tokens: int
    context_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class RestOfBatch:
    """A batch without the tokens whose KV is in the cache."""

    input_tokens: torch.Tensor
    attn_metadata: AttentionMetadata
    begun: list[Prefilled]
    """The sequences with all their tokens, which are not in the batch any more: what the model
    computes behind those that are known is stored by all of them."""


def begun_in(model_input: ModelInput) -> list[Prefilled]:
    """The sequences that this batch prefills from their first token on. What another batch began
    cannot be named by the tokens that are here, and what decodes is not prefilled. None, where the
    KV depends on more than tokens, and none of which the cache does not keep every token (a window
    of attention: such slots are negative)."""
    if isinstance(model_input, RestOfBatch):
        return model_input.begun
    if any(_is_given(getattr(model_input, name, None)) for name in OTHER_INPUTS):
        return []
    metadata = model_input.attn_metadata
    sequences, start = [], 0
    for length, context in zip(metadata.seq_lens, metadata.context_lens, strict=True):
        end = start + length - context
        if end > metadata.num_prefill_tokens:
            break
        slots = metadata.slot_mapping[start:end]
        if context == 0 and bool((slots >= 0).all()):
            sequences.append(Prefilled(model_input.input_tokens[start:end].tolist(), slots, start))
        start = end
    return sequences


def _is_given(value: Sequence[object] | None) -> bool:
    return value is not None and len(value) > 0


def without_known(
    model_input: ModelInput, sequences: list[Prefilled], counts: list[int]
) -> ModelInput:
    """The same batch without the first tokens of `sequences`, as many as `counts` says; of each
    sequence one token at least is left, for its states are wanted."""
    if not any(counts):
        return model_input
    known = {sequence.start: count for sequence, count in zip(sequences, counts, strict=True)}
    of_start = {sequence.start: sequence for sequence in sequences}
    metadata = model_input.attn_metadata
    kept: list[int] = []
    contexts, begun, start = [], list[Prefilled](), 0
    for length, context in zip(metadata.seq_lens, metadata.context_lens, strict=True):
        end = start + length - context
        skipped = min(known.get(start, 0), end - start - 1)
        if sequence := of_start.get(start):
            begun.append(Prefilled(sequence.tokens, sequence.slots, len(kept), skipped))
        kept += range(start + skipped, end)
        contexts.append(context + skipped)
        start = end
    prefill = sum(index < metadata.num_prefill_tokens for index in kept)
    return RestOfBatch(
        model_input.input_tokens[kept],
        Metadata(metadata.seq_lens, metadata.slot_mapping[kept], prefill, contexts),
        begun,
    )
