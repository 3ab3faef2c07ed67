"""`LookupBufferKVConnectorV0`: the first interface of vLLM's KV connectors, on the lookup buffer.

For hosts that drive prefill batches with a slot mapping. A *prefill batch* has the tokens of all
sequences one after the other. The host assigns a slot to each token, its position in the paged
cache; `slot_mapping` has the slots of all tokens of the batch. Nothing of vLLM is imported: the
classes here describe the attributes that the connector reads.

Chunks of each sequence are stored under exact keys, for any number of consumers: the KV, and beside
it the hidden states. A consumer takes what there is, up to the first gap, and leaves the rest to
its model. It never waits for a missing chunk. Runs on the thread of its host.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from connectors.paged import Layers, gather_slots, scatter_slots, slots_of
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import ConfigError, LookupBufferError, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig


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
        """Tokens of sequences that are being prefilled. Those of decoding sequences follow them."""


class ModelInput(Protocol):
    """A batch of the host. It may also have the attributes in `OTHER_INPUTS`."""

    @property
    def input_tokens(self) -> torch.Tensor:
        """The tokens of the batch."""

    @property
    def attn_metadata(self) -> AttentionMetadata: ...


OTHER_INPUTS: Final = (
    "multi_modal_kwargs",
    "lora_requests",
    "prompt_adapter_requests",
    "encoder_input_tokens",
    "inputs_embeds",
)
"""Attributes that the KV of a batch depends on besides its tokens. None or empty where unused."""

KvCaches = list[torch.Tensor]
"""One for each layer of the stage: `[2, blocks, block size * heads * head size]`, or with
`[..., block size, heads, head size]`; `[blocks, block size, size]` of latent vectors (MLA)."""


class IntermediateTensors(Protocol):
    """What a stage of a pipeline passes to the next one, by name; a row for each token."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


States = torch.Tensor | IntermediateTensors
"""The states after the last layer, or after a stage that is not the last."""


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
        """Store what a prefill batch has computed: the KV of its tokens, and the states.

        Args:
            model_input: the batch that ran. After a `recv_…` without bypass, pass the very object
                that it returned: it knows the tokens that are no longer in the batch.
        """

    @abstractmethod
    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KvCaches
    ) -> tuple[States | None, bool, ModelInput]:
        """Load into the cache what other instances have computed of a prefill batch.

        Returns:
            The states of all tokens, in the order of the batch, and True: the model need not run.
            Or None and False: the model has to run with the returned model input, which has the
            tokens that are still to be computed. That is `model_input` itself, or an object with
            the attributes of `ModelInput` alone.
        """


CHUNK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One sequence that a batch prefills from its first token on."""

    tokens: list[int]
    slots: torch.Tensor
    start: int
    """Index in the batch of the sequence's first token that the batch contains."""
    known: int = 0
    """How many of its first tokens are not in the batch, because their KV was loaded."""

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
    """The sequences with all their tokens, also those no longer in the batch. The names of the
    chunks that the model still computes depend on all of them."""


def begun_in(model_input: ModelInput) -> list[Prefilled]:
    """The sequences that this batch prefills from their first token on.

    Left out are sequences that an earlier batch began, as their tokens here do not suffice for
    names; sequences that decode; and sequences of which the cache does not keep every token (window
    attention: such slots are negative). Empty where the KV depends on more than tokens.
    """
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
    """The same batch without the first tokens of `sequences`; `counts` says how many of each. At
    least one token of each sequence stays, because its states are needed."""
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


KV_PART, STATES_PART = "kv", "hidden"
BATCH_SECONDS: Final = 10.0
"""After this time a batch makes no more requests to the buffer."""
INSERT_SECONDS: Final = 2.0

Agree = Callable[[list[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Intermediate:
    """The states of a pipeline's stage that is not the last."""

    names: tuple[str, ...]
    pack: Callable[[dict[str, torch.Tensor]], IntermediateTensors]
    """Makes the object that the host passes to the next stage."""


@dataclass(frozen=True, slots=True)
class FirstConfig:
    """What the host declares of itself, for hosts without a configuration of vLLM."""

    buffer: "BufferConfig"
    namespace: Namespace
    """Names model, weights and dtype. The connector adds the fields below and the rank."""
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
    """None: the stage is the last, or the only one."""
    world_size: int = 1
    agree: Agree | None = None
    """Returns the lowest of each number over all ranks: an `all_reduce(MIN)` of the host. Each rank
    calls it once a batch. So all ranks skip the same tokens, or compute the batch together."""


class LookupBufferKVConnectorV0(KVConnectorBase):
    """The connector; see the module. One thread at a time may use it, as with its host.

    Raises:
        ConfigError: several ranks without `agree`; or, in use, caches or states that do not match
            the configuration.
    """

    def __init__(self, rank: int, local_rank: int, config: FirstConfig) -> None:
        if config.world_size > 1 and config.agree is None:
            raise ConfigError("several ranks have to agree on what they skip: give agree")
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
        for sequence in begun_in(model_input):
            for name, (begin, end) in zip(sequence.names(), sequence.spans, strict=True):
                if begin < sequence.known:
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
        sequences = begun_in(model_input)
        if not sequences or isinstance(model_input, RestOfBatch):
            return None, False, model_input
        sides = self._sides(kv_caches)
        self._until = time.monotonic() + BATCH_SECONDS
        found = [self._receive(sequence, sides) for sequence in sequences]
        numbers = [count for count, _ in found] + [_rows(states) for _, states in found]
        if self._config.agree is not None:
            numbers = self._config.agree(numbers)
        counts, rows = numbers[: len(found)], numbers[len(found) :]
        self.loaded_tokens += sum(counts)
        lengths = [len(sequence.tokens) for sequence in sequences]
        if counts == lengths == rows and sum(lengths) == len(model_input.input_tokens):
            return self._states(found, kv_caches[0].device), True, model_input
        return None, False, without_known(model_input, sequences, counts)

    def _receive(
        self, sequence: Prefilled, sides: list[Layers]
    ) -> tuple[int, list[list[torch.Tensor]]]:
        """Load one sequence. Returns how many of its first tokens have their KV in the cache now,
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
                there = [part for part in rows if part is not None and len(part) == end - begin]
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
            raise ConfigError("a stage that is not the last, and no other, says intermediate")
        if isinstance(states, torch.Tensor):
            return {STATES_PART: states}
        assert intermediate is not None, "just refused"
        tensors = [states.tensors[name] for name in intermediate.names]
        return dict(zip(self._parts, tensors, strict=True))

    def _insert(self, key: TensorKey, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the buffer now. A failure is no error for the host: consumers
        compute the tokens."""
        if time.monotonic() > self._until:
            return False
        try:
            self._buffer.insert(key, tensor, timeout=INSERT_SECONDS)
        except LookupBufferError as error:
            self._note(error)
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
            self._note(error)
            return None

    def _note(self, error: LookupBufferError) -> None:
        """After a node that did not answer, end the batch's requests: a timeout costs its time once
        a batch, not once a sequence."""
        if isinstance(error, NodeUnavailable):
            self._until = 0.0

    def _sides(self, kv_caches: KvCaches) -> list[Layers]:
        """Views by slot of the keys and of the values of each layer; one side for latent vectors.

        Raises:
            ConfigError: the caches differ in number, dtype or form from the configuration.
        """
        config = self._config
        if len(kv_caches) != len(config.layers):
            raise ConfigError(f"{len(kv_caches)} caches for the layers {config.layers}")
        for cache in kv_caches:
            if cache.dtype != config.dtype or not (config.latent or cache.shape[0] == 2):
                raise ConfigError(
                    f"a cache of {cache.dtype} with {tuple(cache.shape)}; it has to have "
                    f"{config.dtype}, and keys and values along its first dimension unless latent"
                )
        heads, head_size = config.heads, config.head_size
        if config.latent:
            return [[slots_of(cache, heads, head_size) for cache in kv_caches]]
        return [[slots_of(cache[side], heads, head_size) for cache in kv_caches] for side in (0, 1)]


def _rows(states: list[list[torch.Tensor]]) -> int:
    """The number of tokens for which there are states."""
    return sum(len(chunk[0]) for chunk in states)
