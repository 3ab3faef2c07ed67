"""What hosts of the first KV connectors pass, as far as we read it. Nothing of vLLM is here.

A *prefill batch* has the tokens of all sequences behind each other. The host gives to each token a
slot, its place in the paged cache; `slot_mapping` has those of all tokens of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch


class AttentionMetadata(Protocol):
    @property
    def seq_lens(self) -> Sequence[int]:
        """Tokens of each sequence, those included that were computed in earlier batches."""

    @property
    def context_lens(self) -> Sequence[int]:
        """Tokens of each sequence that were computed in earlier batches."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the batch's tokens, one each."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of sequences that are being prefilled. Those that decode come behind them."""


class ModelInput(Protocol):
    """It may have `OTHER_INPUTS` besides."""

    @property
    def input_tokens(self) -> torch.Tensor:
        """Of the batch."""

    @property
    def attn_metadata(self) -> AttentionMetadata: ...


OTHER_INPUTS: Final = (
    "multi_modal_kwargs",
    "lora_requests",
    "prompt_adapter_requests",
    "encoder_input_tokens",
    "inputs_embeds",
)
"""What the KV of a batch depends on besides its tokens. None or empty where there is nothing."""

KvCaches = list[torch.Tensor]
"""One for each layer of the stage: `[2, blocks, block size * heads * head size]`, or with
`[..., block size, heads, head size]`; `[blocks, block size, size]` of latent vectors (MLA)."""


class IntermediateTensors(Protocol):
    """What a stage of a pipeline hands to the next one, by names; a row for each token."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


States = torch.Tensor | IntermediateTensors
"""Behind the last layer, or behind a stage that is not the last."""


class KVConnectorBase(ABC):
    """The first interface of vLLM's KV connectors, before its second engine.

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
        """Send what a prefill batch has computed: the KV of its tokens, and the states.

        Args:
            model_input: the batch that ran; after a `recv_…` without bypass the one that it
                returned, the object itself, which knows the tokens that are not in it.
        """

    @abstractmethod
    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: ModelInput, kv_caches: KvCaches
    ) -> tuple[States | None, bool, ModelInput]:
        """Put what others have computed of a prefill batch into the cache.

        Returns:
            The states of all tokens, in the order of the batch, and True: the model need not run.
            Or None and False: it has to, with the model input that is returned, whose tokens are
            those that are still to be computed. It is `model_input` itself, or has the attributes
            of `ModelInput` alone.
        """
