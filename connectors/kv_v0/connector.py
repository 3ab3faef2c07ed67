"""`LookupBufferKVConnectorV0`: the first interface of vLLM's KV connectors, on the lookup buffer.

For hosts that run prefill batches with a slot mapping. A *prefill batch* has the tokens of all
sequences one after the other. The host assigns a slot to each token, its position in the paged
cache; `slot_mapping` has the slots of all tokens of the batch. Nothing of vLLM is imported: the
protocols here describe the attributes that the connector reads.

Each chunk of a sequence is stored under exact keys, for any number of consumers: its KV, and its
hidden states. A consumer loads the chunks up to the first missing one, and its model computes the
rest. It never waits for a missing chunk. Runs on the thread of its host.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from connectors.paged import Layers, gather_slots, scatter_slots, slots_of
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import ConfigError, LookupBufferError, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

CHUNK_TOKENS: Final = 16
"""Tokens of one chunk, the unit of storing and loading."""
BATCH_SECONDS: Final = 10.0
"""After this time a batch makes no more requests to the buffer."""
INSERT_SECONDS: Final = 2.0
"""Timeout of each insert."""
KV_PART, STATES_PART = "kv", "hidden"
OTHER_INPUTS: Final = (
    "multi_modal_kwargs",
    "lora_requests",
    "prompt_adapter_requests",
    "encoder_input_tokens",
    "inputs_embeds",
)
"""Attributes that the KV of a batch depends on besides its tokens. None or empty if unused."""

KvCaches = list[torch.Tensor]
"""One for each layer of the stage: `[2, blocks, block size * heads * head size]`, or with
`[..., block size, heads, head size]`; `[blocks, block size, size]` of latent vectors (MLA)."""


class AttentionMetadata(Protocol):
    @property
    def seq_lens(self) -> Sequence[int]:
        """Tokens of each sequence, including those that were computed in earlier batches."""

    @property
    def context_lens(self) -> Sequence[int]:
        """Tokens of each sequence that were computed in earlier batches."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the batch's tokens, one each."""

    @property
    def num_prefill_tokens(self) -> int:
        """Number of the batch's tokens that prefill sequences. Tokens of decoding sequences follow
        them."""


class ModelInput(Protocol):
    """A batch of the host. It may also have the attributes in `OTHER_INPUTS`."""

    @property
    def input_tokens(self) -> torch.Tensor:
        """The tokens of the batch."""

    @property
    def attn_metadata(self) -> AttentionMetadata: ...


class IntermediateTensors(Protocol):
    """The tensors that a pipeline stage passes to the next one, by name; a row for each token."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


States = torch.Tensor | IntermediateTensors
"""The states after the last layer, or after a stage that is not the last."""
Agree = Callable[[list[int]], list[int]]
"""See `FirstConfig.agree`."""


@dataclass(frozen=True, slots=True)
class Intermediate:
    """The states of a pipeline stage that is not the last."""

    names: tuple[str, ...]
    pack: Callable[[dict[str, torch.Tensor]], IntermediateTensors]
    """Makes the object that the host passes to the next stage."""


@dataclass(frozen=True, slots=True)
class FirstConfig:
    """The description of a host that has no configuration of vLLM."""

    buffer: "BufferConfig"
    namespace: Namespace
    """Must identify model, weights and dtype. The connector adds the fields below and the rank."""
    layers: range
    """The layers of this rank's stage, among all layers of the model."""
    heads: int
    """Heads of this rank; 1 for latent vectors."""
    head_size: int
    dtype: torch.dtype
    """The dtype of the cache."""
    latent: bool = False
    """Whether the cache has one vector for both key and value of a token (MLA)."""
    intermediate: Intermediate | None = None
    """None for the last stage, or the only one."""
    world_size: int = 1
    agree: Agree | None = None
    """Returns the minimum of each number over all ranks: the host's `all_reduce(MIN)`. Each rank
    calls it once per batch, so all ranks skip the same tokens or compute the batch together."""


class KVConnectorBase(ABC):
    """The first interface of vLLM's KV connectors, before vLLM's V1 engine.

    Args:
        rank: of this process among all.
        local_rank: of this process on its host.
        config: of the host.
    """

    @abstractmethod
    def __init__(self, rank: int, local_rank: int, config: Any) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""

    @abstractmethod
    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: ModelInput,
        kv_caches: KvCaches,
        hidden_or_intermediate_states: States,
    ) -> None:
        """Store the results of a prefill batch: the KV of its tokens, and the states.

        Args:
            model_input: the batch that ran. After a `recv_…` without bypass, pass the object that
                it returned: that includes the tokens that are no longer in the batch.
        """

    @abstractmethod
    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KvCaches
    ) -> tuple[States | None, bool, ModelInput]:
        """Load into the cache the results of other instances for a prefill batch.

        Returns:
            The states of all tokens, in the order of the batch, and True: the model need not run.
            Or None and False: the model must run with the returned model input, which has the
            tokens still to be computed. That is `model_input` itself, or an object with only the
            attributes of `ModelInput`.
        """


class LookupBufferKVConnectorV0(KVConnectorBase):
    """The connector; see the module. Only one thread at a time may use it.

    Raises:
        ConfigError: several ranks without `agree`; or, in use, caches or states that do not match
            the configuration.
    """

    def __init__(self, rank: int, local_rank: int, config: FirstConfig) -> None:
        if config.world_size > 1 and config.agree is None:
            raise ConfigError(
                "with world_size > 1, all ranks must skip the same tokens: set 'agree'"
            )
        self._config = config
        self._parts = [STATES_PART]
        if config.intermediate is not None:
            self._parts = [f"{STATES_PART} {name}" for name in config.intermediate.names]
        parts = {"rank": f"{rank} of {config.world_size}", "content": "kv_cache of a batch"}
        layout = {
            "layers": f"{config.layers.start} to {config.layers.stop}",
            "heads": str(config.heads),
            "head_size": str(config.head_size),
            "kv_cache_dtype": str(config.dtype) + (", latent" if config.latent else ""),
        }
        namespace = Namespace({**config.namespace.parts, **parts, **layout})
        self._buffer = LookupBuffer(config.buffer, namespace, required=False)
        self._until = 0.0
        self.loaded_tokens = 0
        """Tokens whose KV was loaded from the buffer."""

    def close(self) -> None:
        self._buffer.close()

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: ModelInput,
        kv_caches: KvCaches,
        hidden_or_intermediate_states: States,
    ) -> None:
        sides = self._sides(kv_caches)
        states = self._by_part(hidden_or_intermediate_states)
        self._until = time.monotonic() + BATCH_SECONDS
        for sequence in new_sequences(model_input):
            for name, (begin, end) in zip(sequence.names(), sequence.spans, strict=True):
                if begin < sequence.loaded:
                    continue
                slots = sequence.slots[begin:end]
                kv = torch.stack([gather_slots(side, slots) for side in sides])
                tensors = {KV_PART: kv}
                for part, rows in states.items():
                    of_chunk = rows[sequence.rows(begin, end)]
                    if len(of_chunk) == end - begin:
                        tensors[part] = of_chunk
                if not all(self._insert(TensorKey(name, part=p), t) for p, t in tensors.items()):
                    break

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KvCaches
    ) -> tuple[States | None, bool, ModelInput]:
        sequences = new_sequences(model_input)
        if not sequences or isinstance(model_input, RestOfBatch):
            return None, False, model_input
        sides = self._sides(kv_caches)
        self._until = time.monotonic() + BATCH_SECONDS
        found = _of_one_form([self._receive(sequence, sides) for sequence in sequences])
        numbers = [count for count, _ in found] + [_rows(states) for _, states in found]
        if self._config.agree is not None:
            numbers = self._config.agree(numbers)
        counts, rows = numbers[: len(found)], numbers[len(found) :]
        self.loaded_tokens += sum(counts)
        lengths = [len(sequence.tokens) for sequence in sequences]
        if counts == lengths == rows and sum(lengths) == len(model_input.input_tokens):
            return self._states(found, kv_caches[0].device), True, model_input
        return None, False, without_loaded(model_input, sequences, counts)

    def _receive(
        self, sequence: "Prefilled", sides: list[Layers]
    ) -> tuple[int, list[list[torch.Tensor]]]:
        """Load one sequence. Returns the number of its first tokens whose KV is in the cache now,
        and the states of its first chunks: for each chunk, a tensor for each part."""
        config = self._config
        count, states = 0, list[list[torch.Tensor]]()
        for name, (begin, end) in zip(sequence.names(), sequence.spans, strict=True):
            kv = self._select(TensorKey(name, part=KV_PART))
            tokens = (end - begin, config.heads, config.head_size)
            expected = (len(sides), len(config.layers), *tokens)
            if kv is None or tuple(kv.shape) != expected or kv.dtype != config.dtype:
                break
            for side, of_side in zip(sides, kv, strict=True):
                scatter_slots(side, sequence.slots[begin:end], of_side)
            if count == _rows(states):
                rows = [self._select(TensorKey(name, part=part)) for part in self._parts]
                there = [
                    part
                    for part in rows
                    if part is not None and part.ndim > 0 and len(part) == end - begin
                ]
                if len(there) == len(rows):
                    states.append(there)
            count = end
        return count, states

    def _states(
        self, found: list[tuple[int, list[list[torch.Tensor]]]], device: torch.device
    ) -> States:
        """The states of all tokens, in the form in which the host's model returns them."""
        chunks = [chunk for _, states in found for chunk in states]
        columns = [torch.cat(column).to(device) for column in zip(*chunks, strict=True)]
        intermediate = self._config.intermediate
        if intermediate is None:
            return columns[0]
        return intermediate.pack(dict(zip(intermediate.names, columns, strict=True)))

    def _by_part(self, states: States) -> dict[str, torch.Tensor]:
        intermediate = self._config.intermediate
        if isinstance(states, torch.Tensor) != (intermediate is None):
            raise ConfigError(
                "set 'intermediate' for a stage that is not the last, and for no other"
            )
        if isinstance(states, torch.Tensor):
            return {STATES_PART: states}
        assert intermediate is not None
        tensors = [states.tensors[name] for name in intermediate.names]
        return dict(zip(self._parts, tensors, strict=True))

    def _insert(self, key: TensorKey, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the buffer now. A failure is not reported to the host: consumers
        then compute the tokens."""
        if time.monotonic() > self._until:
            return False
        try:
            self._buffer.insert(key, tensor, timeout=INSERT_SECONDS)
        except LookupBufferError as error:
            self._end_requests_after(error)
            return False
        return True

    def _select(self, key: TensorKey) -> torch.Tensor | None:
        if time.monotonic() > self._until:
            return None
        try:
            return self._buffer.select(key)
        except MissingTensor:
            return None
        except LookupBufferError as error:
            self._end_requests_after(error)
            return None

    def _end_requests_after(self, error: LookupBufferError) -> None:
        """If the node did not answer, make no more requests for this batch: so it costs one timeout
        per batch, not one per sequence."""
        if isinstance(error, NodeUnavailable):
            self._until = 0.0

    def _sides(self, kv_caches: KvCaches) -> list[Layers]:
        """Views by slot of the keys and of the values of each layer; one side for latent vectors.

        Raises:
            ConfigError: the caches differ in number, dtype or shape from the configuration.
        """
        config = self._config
        if len(kv_caches) != len(config.layers):
            raise ConfigError(
                f"{len(kv_caches)} caches; allowed: one for each of the {len(config.layers)} layers"
            )
        for cache in kv_caches:
            if cache.dtype != config.dtype or not (config.latent or cache.shape[0] == 2):
                raise ConfigError(
                    f"a cache of {cache.dtype} with shape {tuple(cache.shape)}; allowed: "
                    f"{config.dtype}, with keys and values along its first dimension unless latent"
                )
        heads, head_size = config.heads, config.head_size
        if config.latent:
            return [[slots_of(cache, heads, head_size) for cache in kv_caches]]
        return [[slots_of(cache[side], heads, head_size) for cache in kv_caches] for side in (0, 1)]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A sequence that a batch prefills from its first token on."""

    tokens: list[int]
    slots: torch.Tensor
    start: int
    """Index in the batch of the sequence's first token that the batch contains."""
    loaded: int = 0
    """Number of its first tokens that are not in the batch, because their KV was loaded."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each chunk, in tokens of the sequence. The last chunk may be shorter."""
        end = len(self.tokens)
        return [(begin, min(begin + CHUNK_TOKENS, end)) for begin in range(0, end, CHUNK_TOKENS)]

    def names(self) -> list[str]:
        """The name of each chunk: a chain hash of all tokens up to the chunk's end."""
        link, names = b"", []
        for begin, end in self.spans:
            tokens = array("q", self.tokens[begin:end]).tobytes()
            link = hashlib.sha256(link + tokens).digest()
            names.append(link.hex())
        return names

    def rows(self, begin: int, end: int) -> slice:
        """The batch's rows for the sequence's tokens from `begin` to `end`."""
        first = self.start - self.loaded
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
    sequences: list[Prefilled]
    """The sequences with all their tokens, also those no longer in the batch: the names of the
    chunks that the model still computes depend on all tokens."""


def new_sequences(model_input: ModelInput) -> list[Prefilled]:
    """The sequences that this batch prefills from their first token on.

    Not included: sequences that started in an earlier batch, because names need all tokens;
    decoding sequences; and sequences of which the cache does not keep every token (window
    attention: such slots are negative). Empty if the KV depends on more than tokens.
    """
    if isinstance(model_input, RestOfBatch):
        return model_input.sequences
    if any(_is_set(getattr(model_input, name, None)) for name in OTHER_INPUTS):
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


def _is_set(value: Sequence[object] | None) -> bool:
    return value is not None and len(value) > 0


def without_loaded(
    model_input: ModelInput, sequences: list[Prefilled], counts: list[int]
) -> ModelInput:
    """The same batch without the first `counts[i]` tokens of `sequences[i]`. At least one token of
    each sequence stays, because its states are needed."""
    if not any(counts):
        return model_input
    loaded = {sequence.start: count for sequence, count in zip(sequences, counts, strict=True)}
    of_start = {sequence.start: sequence for sequence in sequences}
    metadata = model_input.attn_metadata
    kept: list[int] = []
    contexts, shortened, start = [], list[Prefilled](), 0
    for length, context in zip(metadata.seq_lens, metadata.context_lens, strict=True):
        end = start + length - context
        skipped = min(loaded.get(start, 0), end - start - 1)
        if sequence := of_start.get(start):
            shortened.append(Prefilled(sequence.tokens, sequence.slots, len(kept), skipped))
        kept += range(start + skipped, end)
        contexts.append(context + skipped)
        start = end
    prefill = sum(index < metadata.num_prefill_tokens for index in kept)
    return RestOfBatch(
        model_input.input_tokens[kept],
        Metadata(metadata.seq_lens, metadata.slot_mapping[kept], prefill, contexts),
        shortened,
    )


def _of_one_form(
    found: list[tuple[int, list[list[torch.Tensor]]]],
) -> list[tuple[int, list[list[torch.Tensor]]]]:
    """Without states of another width or dtype than the first: one model has one."""
    forms = [[_form(chunk) for chunk in states] for _, states in found]
    first = next(chain.from_iterable(forms), None)
    return [
        (count, states[: sum(1 for _ in takewhile(first.__eq__, of_states))])
        for (count, states), of_states in zip(found, forms, strict=True)
    ]


def _form(chunk: list[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape[1:]) for part in chunk]


def _rows(states: list[list[torch.Tensor]]) -> int:
    """The number of tokens for which there are states."""
    return sum(len(chunk[0]) for chunk in states)
