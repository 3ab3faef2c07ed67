"""Holds the connector against one vLLM release, in a process of its own.

    PYTHONPATH=HOST:tests/support python tests/support/host_check.py VERSION HOST

HOST is build/hosts/VERSION. vLLM comes from that folder alone: Python sources without its compiled
modules, beside the torch and transformers of this environment. Prints one line and exits 0, or what
is wrong and exits 1.

`STUBBED` names what old vLLM releases import and our environment does not have. Each name is one
that no code under test calls: a stub has every attribute, as an empty class, so that `import` works
and nothing else does.
"""

import logging
import os
import sys
import traceback
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
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


def main() -> int:
    version, sources = sys.argv[1], Path(sys.argv[2]).resolve()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_PLUGINS"] = "lookup_buffer"
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    install()
    try:
        from host_checks import check

        done = check(sources)
    except Exception:
        print(f"{version:8} FAILED")
        traceback.print_exc()
        return 1
    stubs = ", ".join(used()) or "none"
    print(f"{version:8} ok: {'; '.join(done)}; stubs: {stubs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
