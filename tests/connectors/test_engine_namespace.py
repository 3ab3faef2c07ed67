"""The namespace: each thing that the bytes depend on changes it, and nothing else does."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.identifiers import Adapters, NotShareable, shared_key, validate_identifiers
from connectors.namespace import canonical, namespace_parts
from connectors.settings import ConnectorSettings
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from nodes import wait_until

SETTINGS = ConnectorSettings(capacity_bytes=1 << 24)


class HfConfig:
    """A stand-in for a transformers config."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self._commit_hash: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.values


def vllm_config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            code_revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_overrides={},
            seed=0,
            hf_config=HfConfig(
                architectures=["Idefics3"],
                vision_config={"hidden_size": 1152, "image_size": 364},
                text_config={"hidden_size": 2048},
                _name_or_path="/models/one",
                transformers_version="5.0",
            ),
            multimodal_config=SimpleNamespace(
                mm_processor_kwargs=None,
                media_io_kwargs={},
                video_pruning_rate=None,
                mm_processor_cache_gb=4,
            ),
        ),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        lora_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def fingerprint(config: Any, settings: ConnectorSettings = SETTINGS) -> str:
    return Namespace(namespace_parts(config, settings)).fingerprint


def change(path: str, value: Any) -> Callable[[Any], None]:
    *owners, name = path.split(".")

    def apply(config: Any) -> None:
        for owner in owners:
            config = getattr(config, owner)
        if isinstance(config, dict):
            config[name] = value
        else:
            setattr(config, name, value)

    return apply


def lora(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"enable_tower_connector_lora": True, "lora_dtype": "auto"} | options)


CHANGES: dict[str, Callable[[Any], None]] = {
    "model": change("model_config.model", "org/other"),
    "revision": change("model_config.revision", "v2"),
    "commit": change("model_config.hf_config._commit_hash", "abc"),
    "class": change("model_config.architecture", "TransformersMultiModalForCausalLM"),
    "class overrides": change("model_config.model_class_overrides", {"Idefics3": "my:Own"}),
    "code": change("model_config.code_revision", "v2"),
    "dtype": change("model_config.dtype", "torch.float16"),
    "quantization": change("model_config.quantization", "fp8"),
    "overrides": change("model_config.hf_overrides", {"vision_config": {"image_size": 1}}),
    "encoder": change("model_config.hf_config.values", {"vision_config": {"hidden_size": 1}}),
    "processor": change("model_config.multimodal_config.mm_processor_kwargs", {"size": 1}),
    "media": change("model_config.multimodal_config.media_io_kwargs", {"video": {"fps": 1}}),
    "pruning": change("model_config.multimodal_config.video_pruning_rate", 0.5),
    "load": change("load_config.load_format", "dummy"),
    "lora": change("lora_config", lora()),
    "modules of lora": change("lora_config", lora(target_modules=["qkv"])),
    "other modules of lora": change("lora_config", lora(target_modules=["qkv", "proj"])),
    "dtype of lora": change("lora_config", lora(lora_dtype="float32")),
    "experts of lora": change("lora_config", lora(enable_moe_shared_loras=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_changes_the_fingerprint(name: str) -> None:
    one, other = vllm_config(), vllm_config()
    assert fingerprint(one) == fingerprint(other)
    CHANGES[name](other)
    assert fingerprint(one) != fingerprint(other)


def lora_part(*, for_kv: bool, **options: Any) -> str:
    config = vllm_config()
    config.lora_config = lora(**options)
    return namespace_parts(config, SETTINGS, for_kv=for_kv)["lora"]


@pytest.mark.parametrize("for_kv", [False, True])
def test_what_is_made_of_an_adapter_counts_where_it_has_an_effect(*, for_kv: bool) -> None:
    """With other target modules the same adapter computes other KV."""
    for options in (
        {"target_modules": ["o_proj"]},
        {"target_modules": ["o_proj", "qkv_proj"]},
        {"enable_mixed_moe_lora_format": True},
    ):
        part = lora_part(for_kv=for_kv, enable_tower_connector_lora=False, **options)
        assert bool(part) == for_kv
    assert lora_part(for_kv=for_kv, target_modules=["a", "b"], max_loras=1) == lora_part(
        for_kv=for_kv, target_modules=["b", "a"], max_loras=9
    )


@pytest.mark.parametrize("for_kv", [False, True])
def test_adapters_with_the_defaults_of_vllm_leave_the_namespace_as_it_is(*, for_kv: bool) -> None:
    """So an engine without adapters shares what none influences."""
    for dtype in ("auto", "torch.bfloat16"):
        options: dict[str, Any] = {"lora_dtype": dtype, "max_loras": 4, "target_modules": None}
        assert lora_part(for_kv=for_kv, enable_tower_connector_lora=False, **options) == ""


def test_a_setting_of_ours_changes_the_fingerprint() -> None:
    other = ConnectorSettings(capacity_bytes=1 << 24, namespace_extra="x")
    assert fingerprint(vllm_config()) != fingerprint(vllm_config(), other)


def test_no_two_changes_give_the_same_namespace() -> None:
    seen = set()
    for apply in CHANGES.values():
        config = vllm_config()
        apply(config)
        seen.add(fingerprint(config))
    assert len(seen) == len(CHANGES)


def test_seed_counts_only_where_it_makes_the_weights() -> None:
    trained, random = vllm_config(), vllm_config()
    random.load_config.load_format = "dummy"
    for config, matters in ((trained, False), (random, True)):
        other = copy.deepcopy(config)
        other.model_config.seed = 1
        assert (fingerprint(config) != fingerprint(other)) is matters


@pytest.mark.parametrize("name", ["_name_or_path", "transformers_version"])
def test_differences_between_copies_of_a_model_do_not_count(name: str) -> None:
    other = vllm_config()
    other.model_config.hf_config.values[name] = "another"
    assert fingerprint(vllm_config()) == fingerprint(other)


def test_formats_of_one_checkpoint_share() -> None:
    other = vllm_config()
    other.load_config.load_format = "safetensors"
    assert fingerprint(vllm_config()) == fingerprint(other)


@dataclasses.dataclass
class Options:
    """A stand-in for one of vLLM's dataclasses within a configuration."""

    mode: str = "fast"
    kernels: frozenset[str] = frozenset({"a", "b"})


@pytest.mark.parametrize("owner", ["model_config", "model_config.multimodal_config"])
@pytest.mark.parametrize("value", [7, "on", ["a"], {"a": {"b": 1}}, Options(), Options("slow")])
def test_an_unknown_setting_counts(owner: str, value: object) -> None:
    """A later vLLM may have it."""
    others = [vllm_config() for _ in range(2)]
    for other in others:
        change(f"{owner}.of_a_later_release", copy.deepcopy(value))(other)
    assert fingerprint(others[0]) == fingerprint(others[1]) != fingerprint(vllm_config())


def test_values_of_an_unknown_setting_are_distinguished() -> None:
    seen = set()
    for value in (7, "7", [7], {"a": 7}, Options(), Options("slow")):
        config = vllm_config()
        config.model_config.of_a_later_release = value
        seen.add(fingerprint(config))
    assert len(seen) == 6


@pytest.mark.parametrize("version", ["0.33.0", "0.32.1+g1a2b3c4"])
@pytest.mark.parametrize("library", ["vllm", "transformers"])
def test_versions_count(library: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(vllm_config())
    monkeypatch.setattr(f"{library}.__version__", version)
    assert fingerprint(vllm_config()) != before


def test_the_device_that_a_release_was_built_for_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    for version in ("0.32.0", "0.32.0+cpu", "0.32.0+cu129", "0.32.0+rocm700"):
        monkeypatch.setattr("vllm.__version__", version)
        seen.add(fingerprint(vllm_config()))
    assert len(seen) == 1


def test_where_media_are_processed_does_not_count() -> None:
    """As vLLM sets it by itself on an encode-only engine with a GPU."""
    config = vllm_config()
    config.model_config.multimodal_config.mm_processor_kwargs = {"device": "cuda"}
    config.model_config.multimodal_config.media_io_kwargs = {
        "video": {"backend": "torchcodec", "device": "cuda"}
    }
    assert fingerprint(config) == fingerprint(vllm_config())


def test_a_kernel_for_a_quantised_checkpoint_does_not_count() -> None:
    """vLLM puts the name of what suits the device in the place of the checkpoint's method."""
    seen = set()
    for method in ("awq", "awq_marlin"):
        config = vllm_config()
        config.model_config.hf_config.values["quantization_config"] = {"quant_method": "awq"}
        config.model_config.quantization = method
        seen.add(fingerprint(config))
    assert len(seen) == 1


def test_order_does_not_matter() -> None:
    other = vllm_config()
    values = other.model_config.hf_config.values
    other.model_config.hf_config.values = dict(reversed(values.items()))
    assert fingerprint(vllm_config()) == fingerprint(other)


def test_canonical_is_the_same_in_every_process() -> None:
    assert canonical({"b": {3, 1}, "a": len}) == '{"a":"builtins.len","b":[1,3]}'
    assert "0x" not in canonical({"f": lambda: 0})


def test_parts_are_readable() -> None:
    parts = namespace_parts(vllm_config(), SETTINGS)
    assert parts["model"] == "org/model"
    assert parts["dtype"] == "bfloat16"
    assert '"hidden_size":1152' in parts["encoder"]


FILES = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
         "image_processing_mine.py"]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_how_a_local_folder_has_its_media_processed_counts(tmp_path: Path, name: str) -> None:
    """Identifiers hash the media as the client sent them, so they do not depend on these files."""
    folders = [tmp_path / folder for folder in ("one", "copy", "other")]
    parts = []
    for folder in folders:
        folder.mkdir()
        (folder / name).write_text("mean = 0.5" if folder.name != "other" else "mean = 0.6")
        (folder / "generation_config.json").write_text(folder.name)
        config = vllm_config()
        config.model_config.model = str(folder)
        parts.append(dict(namespace_parts(config, SETTINGS), model=""))
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize("name", ["VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR"])
def test_how_vllm_decodes_media_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video's identifier is a hash of its file and does not depend on the sampled frames."""
    before = fingerprint(vllm_config())
    monkeypatch.setenv(name, "another")
    assert fingerprint(vllm_config()) != before


def test_scales_of_an_encoder_in_fp8_count_by_content(tmp_path: Path) -> None:
    fingerprints = []
    for name, scale in (("one", "1.0"), ("copy", "1.0"), ("other", "2.0")):
        (tmp_path / name).write_text(scale)
        config = vllm_config()
        config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(tmp_path / name)
        fingerprints.append(fingerprint(config))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert fingerprints[0] != fingerprint(vllm_config())


# -- identifiers


@pytest.mark.parametrize(
    ("identifier", "request_id", "lora", "reason"),
    [
        ("5f3a" * 16, "r-1", None, None),
        ("my-own-image-0", "r-1", None, None),
        ("renderer0-mm-1-image-0", "r-1", None, "identifier_counted"),
        ("chat-7-image-0", "chat-7", None, "identifier_counted"),
        ("chat-7-image-0", "chat-7-0a1b2c3d", None, "identifier_counted"),
        ("chat-7-image-0", "chat-70", None, None),
        ("cats:5f3a", "r-1", "cats", "lora"),
        ("5f3a", "r-1", "cats", None),
        ("", "r-1", None, "identifier_length"),
        ("x" * 5000, "r-1", None, "identifier_length"),
        ("x" * 4096, "r-1", None, None),
        ("\N{CAT FACE}" * 341, "r-1", None, None),
        ("\N{CAT FACE}" * 342, "r-1", None, "identifier_length"),
        ("\udcff" * 1000, "r-1", None, "identifier_length"),
    ],
)
def test_which_identifiers_are_shared(
    identifier: str, request_id: str, lora: str | None, reason: str | None
) -> None:
    adapter = lora and SimpleNamespace(lora_name=lora, lora_int_id=1, lora_path="/nowhere")
    request = SimpleNamespace(request_id=request_id, lora_request=adapter)
    if reason is None:
        assert shared_key(identifier, request, Adapters()) == TensorKey(identifier)
    else:
        with pytest.raises(NotShareable) as refused:
            shared_key(identifier, request, Adapters())
        assert str(refused.value) == reason


@pytest.mark.parametrize("mm_hash", ["5f3a", None], ids=["told", "older host"])
def test_an_item_of_an_unnamed_adapter_is_not_shared(mm_hash: str | None, tmp_path: Path) -> None:
    """vLLM's Rust front end does not put the adapter's name in front of the item's."""
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    cats = SimpleNamespace(lora_name="cats", lora_int_id=1, lora_path=str(tmp_path))
    adapted = SimpleNamespace(request_id="r-1", lora_request=cats)
    plain = SimpleNamespace(request_id="r-2", lora_request=None)
    adapters = Adapters(encode=True)
    wait_until(lambda: adapters.digest_of(cats), 5.0)
    named = TensorKey("5f3a", part=f"lora-{adapters.digest_of(cats)}")
    assert shared_key("cats:5f3a", adapted, adapters, mm_hash) == named
    assert shared_key("5f3a", plain, adapters, mm_hash) == TensorKey("5f3a")
    with pytest.raises(NotShareable, match="lora"):
        shared_key("5f3a", adapted, adapters, mm_hash)
    with pytest.raises(NotShareable, match="lora"):  # vLLM's own cache has the one for the other
        shared_key("5f3a", plain, adapters, mm_hash)
    assert shared_key("cats:5f3a", adapted, adapters, mm_hash) == named
    assert shared_key("b0b0", plain, adapters) == TensorKey("b0b0")


def test_an_identifiers_prefix_is_that_of_the_vllm_release() -> None:
    """A client may call an item as if an adapter stood in front."""
    cats = SimpleNamespace(lora_name="cats", lora_int_id=1, lora_path="/nowhere")
    adapted = SimpleNamespace(request_id="r-1", lora_request=cats)
    plain = SimpleNamespace(request_id="r-2", lora_request=None)
    name = "cats:5f3a"
    assert shared_key(name, adapted, Adapters(), name) == TensorKey(name)
    assert shared_key(name, plain, Adapters(encode=True), name) == TensorKey(name)
    with pytest.raises(NotShareable, match="lora"):  # an adapter's, and the request has none
        shared_key(name, plain, Adapters(encode=True), "5f3a")
    with pytest.raises(NotShareable, match="lora"):
        shared_key(name, adapted, Adapters(encode=True), name)


def test_the_longest_identifier_makes_a_key(tmp_path: Path) -> None:
    """Also where each character is escaped, and an adapter's digest stands beside it."""
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    adapter = SimpleNamespace(lora_name="é", lora_int_id=1, lora_path=str(tmp_path))
    request, adapters = SimpleNamespace(request_id="r", lora_request=adapter), Adapters()
    wait_until(lambda: adapters.digest_of(adapter), 5.0)
    fitting = 0
    for length in range(1200, 1400):
        identifier = "é:" + "%" * length
        try:
            key = shared_key(identifier, request, adapters)
        except NotShareable:
            continue
        assert key.part == f"lora-{adapters.digest_of(adapter)}"
        fitting += 1
    assert 0 < fitting < 200
    with pytest.raises(NotShareable, match="identifier_length"):
        shared_key("é:", request, adapters)


def test_host_with_counted_identifiers_is_refused() -> None:
    config = vllm_config()
    config.cache_config.enable_prefix_caching = False
    validate_identifiers(config)
    config.model_config.multimodal_config.mm_processor_cache_gb = 0
    with pytest.raises(ConfigError, match="mm_processor_cache_gb is 0 and prefix caching is off"):
        validate_identifiers(config)
    config.cache_config.enable_prefix_caching = True
    validate_identifiers(config)
    config.model_config.multimodal_config = None
    validate_identifiers(config)
