"""The entry point: makes the name known, twice is fine, and never an error for a bystander."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
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


OURS = {"kv_connector": KV_CONNECTOR_NAME, "kv_role": "kv_both"}
INSIDE = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector"}, OURS]},
}
FOREIGN = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def accepted(
    kv: dict[str, Any], ec_role: str = "", *, is_enabled: bool = False
) -> tuple[bool, bool]:
    """As vLLM resolves it: whether items may come without media, and whether as embeddings."""
    from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig

    multimodal = SimpleNamespace(allow_missing_mm_embeddings=False, enable_mm_embeds=is_enabled)
    ec = ECTransferConfig(ec_connector=CONNECTOR_NAME, ec_role=ec_role) if ec_role else None
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        kv_transfer_config=KVTransferConfig(**kv),
        ec_transfer_config=ec,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    return multimodal.allow_missing_mm_embeddings, multimodal.enable_mm_embeds


@pytest.mark.parametrize("kv", [OURS, INSIDE], ids=["alone", "inside MultiConnector"])
def test_items_without_media_are_refused_where_their_kv_is_only_cached(kv: dict[str, Any]) -> None:
    """An encoder that runs on nothing ends the engine. What the user enabled stays enabled, and a
    producer of encoder outputs is sent none either."""
    register()
    assert accepted(kv) == (False, False)
    assert accepted(kv, is_enabled=True) == (False, True)
    assert accepted(kv, "ec_producer") == (False, False)


def test_items_without_media_are_accepted_where_something_delivers_them() -> None:
    register()
    assert accepted(OURS, "ec_consumer") == (True, True)
    assert accepted(OURS, "ec_both") == (True, True)
    assert accepted(FOREIGN) == (True, True), "vLLM's rule for connectors that are no caches"


def test_vllm_is_patched_once_and_a_model_without_media_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import VllmConfig

    register()
    patched = VllmConfig._resolve_mm_embedding_inputs
    register()
    assert VllmConfig._resolve_mm_embedding_inputs is patched
    for model in (None, SimpleNamespace(multimodal_config=None)):
        patched(SimpleNamespace(model_config=model))
    monkeypatch.delattr(VllmConfig, "_resolve_mm_embedding_inputs")
    register()
    assert not hasattr(VllmConfig, "_resolve_mm_embedding_inputs")


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
