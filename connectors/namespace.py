"""The namespace of an engine: all that encoder outputs depend on and item hashes do not hold.

Made once per connector from vLLM's configuration, before the model is loaded; the weights' part
follows (see `naming`). The device is no part: an encoder on one kind of GPU makes outputs for
consumers on another. The parts are published in clear text, so they hold no secret and no path: see
`disclosure`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors import hub
from connectors.adapters import reach_encoder
from connectors.config_fields import IGNORED_MODEL, IGNORED_MULTIMODAL, counted, plain
from connectors.disclosure import disclosed
from connectors.naming import Identity
from connectors.settings import SharedSettings
from connectors.weights import CHECKPOINT_FORMATS, format_of, weights_source

PROTOCOL_VERSION = "1"
# Differ between two copies of one model, or between transformers' releases, without a meaning.
_VOLATILE = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_PROCESSOR_FILES = ("*processor*.json", "*feature_extract*.json", "*.py")
"""In a folder: how media become the encoder's input, and the code that a model brings along."""
# Of vLLM's environment. Videos are named by the file as the client sent it, whatever frames are
# taken out of it; the others change what the encoder's layers compute.
_VARIABLES = (
    "VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
)  # fmt: skip
_SUMMARY = ("model_type", "hidden_size", "d_model", "image_size", "patch_size", "num_hidden_layers")
_TOWERS = ("vision_config", "audio_config", "thinker_config", "vision_encoder", "audio_encoder")
_DEVICE_BUILD = re.compile(r"(?:cpu|cu\d+|rocm\d*|xpu|tpu|hpu|precompiled)\Z")
"""What a release's local version says of the device that it was built for."""


def engine_identity(vllm_config: Any, settings: SharedSettings) -> Identity:
    """What this engine shares under. To be called before the model is loaded.

    Raises:
        OSError: a file of the model cannot be read; the engine could not load it either.
    """
    source = weights_source(vllm_config, settings.weights_version)
    return Identity(namespace_parts(vllm_config, settings), source)


def namespace_parts(
    vllm_config: Any, settings: SharedSettings, *, for_kv: bool = False
) -> dict[str, str]:
    """Name and readable value of each part but the weights."""
    model = vllm_config.model_config
    hf_config = _hf_config(model)
    commit = hub.commit_of(model, vllm_config.load_config)
    return {
        "protocol": PROTOCOL_VERSION,
        "vllm": _vllm_version(),
        "transformers": _transformers_version(),
        "model": disclosed(hub.repository(str(model.model))),
        "revision": commit or str(getattr(model, "revision", None) or ""),
        "implementation": _implementation(model),
        "code_revision": str(getattr(model, "code_revision", None) or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _quantization(model, hf_config),
        "hf_overrides": canonical(getattr(model, "hf_overrides", None) or {}),
        "settings": canonical(counted(model, IGNORED_MODEL, for_kv=for_kv)),
        "encoder": _summary(hf_config),
        "encoder_config": _digest(hf_config),
        "processor": _processor(model, for_kv=for_kv),
        "processor_files": "" if commit else _processor_files(model),
        "load_format": _load_format(vllm_config),
        "lora": _lora(vllm_config),
        "extra": settings.namespace_extra,
    }


def _vllm_version() -> str:
    """Without what the release was built for: the device is no part."""
    from vllm import __version__

    public, _, local = str(__version__).partition("+")
    kept = [label for label in local.split(".") if label and not _DEVICE_BUILD.match(label)]
    return f"{public}+{'.'.join(kept)}" if kept else public


def _transformers_version() -> str:
    from transformers import __version__

    return str(__version__)


def canonical(value: object) -> str:
    """JSON that is equal for equal values, whatever their order, and that everybody may read."""
    return json.dumps(disclosed(plain(value)), sort_keys=True, separators=(",", ":"))


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


def _implementation(model: Any) -> str:
    """The class that vLLM found for the model: its own or one of transformers', or a plugin's."""
    name = str(getattr(model, "architecture", None) or "")
    replaced = getattr(model, "model_class_overrides", None)
    return canonical({"class": name, "replaced": replaced}) if replaced else name


def _quantization(model: Any, hf_config: Mapping[str, Any]) -> str:
    """The method; with options of its own (what it leaves out, say) those as well. A checkpoint
    that is quantised says its method itself: vLLM puts a kernel's name, which depends on the
    device, in its place."""
    own = hf_config.get("quantization_config") or {}
    method = str(own.get("quant_method") or getattr(model, "quantization", None) or "")
    options = getattr(model, "quantization_config", None)
    return canonical({"method": method, "options": options}) if options else method


def _processor(model: Any, *, for_kv: bool) -> str:
    from vllm import envs

    multimodal = getattr(model, "multimodal_config", None)
    settings = counted(multimodal, IGNORED_MULTIMODAL, for_kv=for_kv)
    variables = {name: getattr(envs, name, None) for name in _VARIABLES}
    settings |= {name: value for name, value in variables.items() if value}
    _without_device(settings)
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales:
        settings["mm_encoder_fp8_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return canonical(settings)


def _without_device(settings: dict[str, Any]) -> None:
    """Take out where media are decoded and processed. On an encode-only engine with a GPU vLLM sets
    that itself, and a decoder of videos with it."""
    options = settings.get("mm_processor_kwargs")
    if isinstance(options, dict):
        options.pop("device", None)
    for medium in settings.get("media_io_kwargs", {}).values():
        if isinstance(medium, dict) and medium.pop("device", None):
            medium.pop("backend", None)
    media = settings.get("media_io_kwargs", {})
    settings["media_io_kwargs"] = {name: options for name, options in media.items() if options}
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if not settings.get(name):
            settings.pop(name, None)


def _processor_files(model: Any) -> str:
    """Of a local folder; those of a repository are told apart by its commit."""
    folder = Path(str(model.model))
    paths = {path for pattern in _PROCESSOR_FILES for path in folder.glob(pattern)}
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return _digest(digests) if digests else ""


def _load_format(vllm_config: Any) -> str:
    load = vllm_config.load_config
    name = format_of(load)
    if name in CHECKPOINT_FORMATS:
        return "checkpoint"
    extra = getattr(load, "model_loader_extra_config", None) or {}
    return canonical({"format": name, "seed": vllm_config.model_config.seed, "extra": extra})


def _lora(vllm_config: Any) -> str:
    """Whether adapters reach the encoder. Which adapter is part of an item's identifier."""
    if not reach_encoder(vllm_config):
        return ""
    dtype = getattr(vllm_config.lora_config, "lora_dtype", "")
    return canonical({"tower": True, "dtype": str(dtype)})
