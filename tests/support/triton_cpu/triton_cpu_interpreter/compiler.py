"""What Triton asks of a compiler. The interpreter never asks for more than its target."""

from types import ModuleType

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpretedBackend(BaseBackend):
    """Refuses to compile."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, object]) -> object:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict[str, object], options: object, language: Language) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
