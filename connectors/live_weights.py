"""Weights that change in a running engine, noticed by a worker before its scheduler promises again.

vLLM tells no connector of it. But all its ways to new weights (`reload_weights`, a worker extension
of a training framework) end in the model's `load_weights`, or write into its parameters, and all
of them run in the workers between two steps, while the scheduler waits. So the worker puts up its
flag before the first tensor changes.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from connectors.counters import logger
from connectors.weights_flag import WeightsFlag

if TYPE_CHECKING:
    import torch

# Names under which checkpoints keep the parts that make encoder outputs.
ENCODER_NAMES = (
    "vision", "visual", "vit", "image", "audio", "speech", "whisper", "tower", "encoder", "patch",
    "projector", "projection", "connector", "merger", "aligner", "multi_modal", "mm_", "resampler",
)  # fmt: skip
_ENCODES = "embed_multimodal"
"""What vLLM calls to have media encoded, since 0.12."""


class WeightsWatch:
    """In the model's thread. Made before the model is; `start`, then `begin` once it is loaded.

    Args:
        engine_id: names the flag.
        names: parameters with one of these in their name are looked at; where there are none, any.
        experts_move: whether vLLM puts experts into each other's places (`enable_eplb`), which
            changes parameters and nothing that is computed with them.
        mark: of the weights' files before the model was loaded; see `WeightsSource`.
    """

    def __init__(
        self,
        engine_id: str,
        names: Sequence[str] = ENCODER_NAMES,
        *,
        experts_move: bool = False,
        mark: bytes = b"",
    ) -> None:
        from torch.nn.modules.module import register_module_module_registration_hook

        self._names = names
        self._experts_move = experts_move
        self._engine_id = engine_id
        self._mark = mark
        self._flag: WeightsFlag | None = None
        self._changed = False
        self._loaders: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that load weights, as far as they have parts."""
        self._parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook: Any = register_module_module_registration_hook(self._built)
        self._parameters: list[torch.nn.Parameter] = []
        self._version = 0
        """The sum of their version counters, which only grow."""

    def _built(self, module: "torch.nn.Module", _: str, part: "torch.nn.Module | None") -> None:
        if hasattr(module, "load_weights"):
            self._loaders.add(module)
        if part is not None:
            self._parts.add(part)

    def find(self) -> None:
        """The model is there already: find it. Takes some tenths of a second."""
        from torch.nn import Module

        # By its type: an object may say of itself what it is not, or load a library to say so.
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), Module)]
        for module in modules:
            if hasattr(module, "load_weights"):
                self._loaders.add(module)
            self._parts.update(module.children())

    def start(self) -> None:
        """Before there is a scheduler. Never raises."""
        try:
            self._flag = WeightsFlag.make(self._engine_id, self._mark)
        except OSError as error:
            message = "lookup buffer: weights that change would not stop this engine's loads: %s"
            logger.warning(message, error)

    def begin(self) -> None:
        """The model is loaded: what is written into it from now on is a change. Idempotent."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        whole = list(self._loaders - self._parts)
        if not whole:
            logger.warning("lookup buffer: no model found; weights that change are not noticed")
        # Not a draft model beside it.
        for model in [model for model in whole if hasattr(model, _ENCODES)] or whole:
            self._watch(model)
        self._version = self._current_version()
        self._loaders.clear()
        self._parts.clear()

    def _watch(self, model: "torch.nn.Module") -> None:
        own = model.__dict__.get("load_weights")

        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._notice()
            if own is not None:
                return own(*args, **kwargs)
            # Looked up now: a training framework may have replaced it meanwhile.
            kind: Any = type(model)
            return kind.load_weights(model, *args, **kwargs)

        model.load_weights = noticed  # type: ignore[assignment]
        moved = self._experts_of(model) if self._experts_move else set()
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not parameter.is_inference() and parameter not in moved
        ]
        encoder = [p for n, p in named if any(word in n.lower() for word in self._names)]
        self._parameters += encoder or [p for _, p in named]

    def _experts_of(self, model: "torch.nn.Module") -> "set[torch.nn.Parameter]":
        """Parameters of layers that vLLM asks for the weights of their experts."""
        layers = [module for module in model.modules() if hasattr(module, "get_expert_weights")]
        return {parameter for layer in layers for parameter in layer.parameters()}

    def _current_version(self) -> int:
        """Takes a tenth of a millisecond for a thousand parameters."""
        return sum(parameter._version for parameter in self._parameters)

    def _notice(self) -> None:
        if not self._changed:
            self._changed = True
            if self._flag is not None:
                self._flag.put_up()

    def changed(self) -> bool:
        """Whether the weights are no longer those that the engine started with."""
        self.begin()  # hosts that do not say when the model is loaded
        if not self._changed and self._version != self._current_version():
            self._notice()
        return self._changed

    def close(self) -> None:
        """Idempotent."""
        if self._hook is not None:  # the model was never loaded
            self._hook.remove()
        if self._flag is not None:
            self._flag.close()
