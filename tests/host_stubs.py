"""Stand-ins for what old vLLM releases import and our environment does not have.

Only for the host matrix (`make test-hosts`). Each name is one that no code under test calls: a stub
has every attribute, as an empty class, so that `import` works and nothing else does.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

STUBBED = {
    "gguf": "reads GGUF checkpoints; imported with the configuration in 0.23 and older",
    "diskcache": "keeps compiled grammars; imported with the scheduler in 0.18 and older",
}


class Stub(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 -- as ModuleType declares it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class StubFinder(MetaPathFinder, Loader):
    """Asked last, so a module that is installed is never replaced."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Before anything of vLLM but its platforms is imported."""
    sys.meta_path.append(StubFinder())
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class BarePlatform(CpuPlatform):  # type: ignore[misc]
        """A release without its compiled modules takes this machine for none that it knows."""

        @classmethod
        def import_kernels(cls) -> None:
            """There are none."""

    vllm.platforms.current_platform = BarePlatform()


def used() -> list[str]:
    """Which of them this process has really needed."""
    return sorted(name for name in STUBBED if isinstance(sys.modules.get(name), Stub))
