"""`LookupBufferKVConnectorV0`: the first interface of vLLM's KV connectors, on the lookup buffer.

For hosts that drive prefill batches with a slot mapping; see `kv.host`. Chunks of each sequence are
stored under exact keys, for any number of consumers: their KV, and beside it the hidden states. A
consumer takes what there is, up to the first gap, and leaves the rest to its model. Nothing waits
for what is not there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from connectors.kv.batches import Prefilled, RestOfBatch, begun_in, without_known
from connectors.kv.host import IntermediateTensors, KvCaches, KVConnectorBase, ModelInput, States
from connectors.paged import Layers, gather_slots, scatter_slots, slots_of
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import ConfigError, LookupBufferError, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

KV_PART, STATES_PART = "kv", "hidden"
BATCH_SECONDS: Final = 10.0
"""After so long a batch asks the buffer for nothing more."""
INSERT_SECONDS: Final = 2.0

Agree = Callable[[list[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Intermediate:
    """The states of a pipeline's stage that is not the last."""

    names: tuple[str, ...]
    pack: Callable[[dict[str, torch.Tensor]], IntermediateTensors]
    """Makes what the host hands to the next stage."""


@dataclass(frozen=True, slots=True)
class FirstConfig:
    """What the host says of itself, for hosts without a configuration of vLLM's."""

    buffer: "BufferConfig"
    namespace: Namespace
    """Names model, weights and dtype; what follows and the rank are added."""
    layers: range
    """Those of this rank's stage, among all of the model."""
    heads: int
    """Of this rank; 1 where latent vectors are kept."""
    head_size: int
    dtype: torch.dtype
    """Of the cache."""
    latent: bool = False
    """Whether the cache has one vector for key and value of a token (MLA)."""
    intermediate: Intermediate | None = None
    """None: the stage is the last, or the only one."""
    world_size: int = 1
    agree: Agree | None = None
    """The lowest of each number over all ranks, an `all_reduce(MIN)` of the host; each calls it
    once a batch. Ranks compute a batch together, or all of them leave the same out."""


class LookupBufferKVConnectorV0(KVConnectorBase):
    """See the module. One thread at a time, as its host's.

    Raises:
        ConfigError: several ranks, and no way to agree; or, in use, caches that are not as the
            configuration says.
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
        """Tokens whose KV was taken from others."""

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
        """How many of its tokens have their KV in the cache now, and the states of the first: for
        each chunk, by parts."""
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
        """Of all tokens, as the host's model would have handed them on."""
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
        """Whether it is there now. If not, others compute it: never the host's concern."""
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
        """A node that did not answer costs its time once a batch, not once a sequence."""
        if isinstance(error, NodeUnavailable):
            self._until = 0.0

    def _sides(self, kv_caches: KvCaches) -> list[Layers]:
        """Keys and values of each layer, by slots; of latent vectors there is one side."""
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
    """For how many tokens there are states."""
    return sum(len(chunk[0]) for chunk in states)
