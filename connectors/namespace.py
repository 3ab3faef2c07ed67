"""The namespace of an engine: all that encoder outputs depend on and item hashes do not hold.

Built once per connector from vLLM's configuration; scheduler and workers of one engine build equal
ones. In doubt a part is in: a part too many costs sharing between engines that could have shared, a
part too few gives wrong answers. The parts are published in clear text, so they hold no secret and
no path: see `disclosure`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.disclosure import disclosed
from connectors.settings import SharedSettings
from connectors.weights import weights_digest
from lookup_buffer.namespace import Namespace

PROTOCOL_VERSION = "1"
# Formats that put the checkpoint's own values into the model. Any other (dummy, a registered
# loader) makes weights in a way that only its name, its settings and the seed describe.
CHECKPOINT_FORMATS = frozenset(
    {"auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral",
     "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer", "ipc_cache"}
)  # fmt: skip
# Differ between two copies of one model, or between transformers' releases, without a meaning.
_VOLATILE = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_PROCESSOR_FILES = ("*processor*.json", "*feature_extract*.json", "*.py")
"""In a folder: how media become the encoder's input, and the code that a model brings along."""
_PROCESSOR_SETTINGS = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
# Of vLLM's environment. Videos are named by the file as the client sent it, whatever frames are
# taken out of it.
_DECODERS = ("VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR")
_SUMMARY = ("model_type", "hidden_size", "d_model", "image_size", "patch_size", "num_hidden_layers")
_TOWERS = ("vision_config", "audio_config", "thinker_config", "vision_encoder", "audio_encoder")


def engine_namespace(vllm_config: Any, settings: SharedSettings) -> Namespace:
    """The namespace under which this engine shares."""
    return Namespace(namespace_parts(vllm_config, settings))


def namespace_parts(vllm_config: Any, settings: SharedSettings) -> dict[str, str]:
    """Name and readable value of each part."""
    model = vllm_config.model_config
    hf_config = _hf_config(model)
    return {
        "protocol": PROTOCOL_VERSION,
        "model": disclosed(str(model.model)),
        "revision": _revision(model),
        "implementation": _implementation(model),
        "code_revision": str(getattr(model, "code_revision", None) or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _quantization(model),
        "hf_overrides": canonical(disclosed(getattr(model, "hf_overrides", None) or {})),
        "encoder": _summary(hf_config),
        "encoder_config": _digest(hf_config),
        "processor": _processor(model),
        "processor_files": _processor_files(model),
        "load_format": _load_format(vllm_config),
        "weights": settings.weights_version or _weights(model),
        "lora": _lora(vllm_config),
        "extra": settings.namespace_extra,
    }


def canonical(value: object) -> str:
    """JSON that is equal for equal values, whatever their order.

    Functions are named, not shown: their repr holds an address that no two processes share.
    """
    return json.dumps(value, sort_keys=True, default=_plain, separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    return str(value)


def _digest(value: object) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _hf_config(model: Any) -> dict[str, Any]:
    config = getattr(model, "hf_config", None)
    if config is None:
        return {}
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    stripped = _without_volatile(values)
    assert isinstance(stripped, dict)
    return stripped


def _without_volatile(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_volatile(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_without_volatile(item) for item in value]
    return value


def _summary(hf_config: Mapping[str, Any]) -> str:
    """What a person recognises: the architecture and the towers' sizes."""
    shown: dict[str, Any] = {"architectures": hf_config.get("architectures")}
    for tower in _TOWERS:
        values = hf_config.get(tower)
        if isinstance(values, Mapping):
            shown[tower] = {name: values[name] for name in _SUMMARY if name in values}
    return canonical(shown)


def _revision(model: Any) -> str:
    """The commit where it is known: a branch name means another commit tomorrow."""
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return str(commit or getattr(model, "revision", None) or "")


def _implementation(model: Any) -> str:
    """The class that vLLM found for the model: its own or one of transformers', or a plugin's."""
    name = str(getattr(model, "architecture", None) or "")
    replaced = getattr(model, "model_class_overrides", None)
    return canonical({"class": name, "replaced": replaced}) if replaced else name


def _quantization(model: Any) -> str:
    """The method; with options of its own (what it leaves out, say) those as well. What a
    checkpoint says of its own quantisation is part of the model's configuration."""
    method = str(getattr(model, "quantization", None) or "")
    options = getattr(model, "quantization_config", None)
    options = disclosed(options)
    return canonical({"method": method, "options": options}) if options else method


def _processor(model: Any) -> str:
    from vllm import envs

    multimodal = getattr(model, "multimodal_config", None)
    settings = {name: getattr(multimodal, name, None) for name in _PROCESSOR_SETTINGS}
    settings |= {name: getattr(envs, name, None) for name in _DECODERS}
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales:
        settings["mm_encoder_fp8_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    used = {name: value for name, value in settings.items() if value not in (None, {})}
    return canonical(disclosed(used))


def _processor_files(model: Any) -> str:
    """Of a local folder; a name on a hub is told apart by its revision."""
    folder = Path(str(model.model))
    paths = {path for pattern in _PROCESSOR_FILES for path in folder.glob(pattern)}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return _digest(digests) if digests else ""


def _load_format(vllm_config: Any) -> str:
    load = vllm_config.load_config
    name = getattr(load.load_format, "value", str(load.load_format))
    if name in CHECKPOINT_FORMATS:
        return "checkpoint"
    extra = disclosed(getattr(load, "model_loader_extra_config", None) or {})
    return canonical({"format": name, "seed": vllm_config.model_config.seed, "extra": extra})


def _weights(model: Any) -> str:
    """A local folder's content; a name on a hub is told apart by its revision."""
    folder = Path(str(getattr(model, "model_weights", "") or model.model))
    if folder.is_file():
        folder = folder.parent
    return weights_digest(folder) if folder.is_dir() else ""


def _lora(vllm_config: Any) -> str:
    """Whether adapters reach the encoder. Which adapter is part of an item's identifier."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None or not getattr(lora, "enable_tower_connector_lora", False):
        return ""
    return canonical({"tower": True, "dtype": str(getattr(lora, "lora_dtype", ""))})
