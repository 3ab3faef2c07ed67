"""The entry point: makes the name known, twice is fine, and never an error for a bystander."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from connectors.plugin import (
    CONNECTOR_MODULE,
    CONNECTOR_NAME,
    KV_CONNECTOR_MODULE,
    KV_CONNECTOR_NAME,
    register,
)
from patience import scaled

FACTORY = "vllm.distributed.ec_transfer.ec_connector.factory"
KV_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Registry:
    """A stand-in for vLLM's `ECConnectorFactory`."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.known[name] = (module_path, class_name)


def install(monkeypatch: pytest.MonkeyPatch, factory: object) -> None:
    for parts in (FACTORY.split("."), KV_FACTORY.split(".")):
        for length in range(1, len(parts)):
            name = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(FACTORY)
    if factory is not None:
        module.ECConnectorFactory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FACTORY, module)
    kv_module = ModuleType(KV_FACTORY)
    if factory is not None:
        kv_module.KVConnectorFactory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KV_FACTORY, kv_module)


def test_registers_once_however_often_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    install(monkeypatch, registry)
    register()
    register()
    assert registry.known == {
        CONNECTOR_NAME: (CONNECTOR_MODULE, CONNECTOR_NAME),
        KV_CONNECTOR_NAME: (KV_CONNECTOR_MODULE, KV_CONNECTOR_NAME),
    }


def test_vllm_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    register()


def test_registry_that_is_quite_different(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, object())
    register()
    assert CONNECTOR_NAME in caplog.text


def test_hashes_take_a_snapshot_for_its_repository_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.processing import inputs

    def hashes(self: object, model_id: str, algorithm: str) -> str:
        return f"{model_id} by {algorithm}"

    monkeypatch.setattr(inputs.ProcessorInputs, "get_mm_hashes", hashes)
    register()
    patched = inputs.ProcessorInputs.get_mm_hashes
    register()
    assert inputs.ProcessorInputs.get_mm_hashes is patched
    snapshot: Any = f"/cache/models--org--name/snapshots/{'0a' * 20}"
    made: Any = patched
    assert made(None, snapshot, "sha256") == "org/name by sha256"
    assert made(None, model_id="/a/folder", algorithm="blake3") == "/a/folder by blake3"


@pytest.mark.parametrize(
    "other",
    [None, lambda self, name, algorithm: name, lambda: "", 7],
    ids=["nothing", "other names", "no parameters", "no function"],
)
def test_a_vllm_that_hashes_in_another_way_is_left_alone(
    other: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.multimodal.processing import inputs

    if other is None:
        monkeypatch.delattr(inputs, "ProcessorInputs")
    else:
        monkeypatch.setattr(inputs.ProcessorInputs, "get_mm_hashes", other)
    register()
    if other is not None:
        assert inputs.ProcessorInputs.get_mm_hashes is other


@pytest.mark.processes
def test_no_vllm_at_all_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from connectors.plugin import register; register()\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'redis'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))


@pytest.mark.processes
def test_scheduler_side_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import connectors.ec.scheduler, connectors.namespace, connectors.settings\n"
        "import connectors.kv.scheduler, connectors.kv.engine"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))
