"""The namespace of an engine: all that encoder outputs depend on and item hashes do not cover.

It consists of named parts. `namespace_parts` reads them from vLLM's configuration, once per
connector, before the model is loaded. `NamespaceTask` adds the part of the weights on the scheduler
side: at once, or after hashing the files on a thread. The device is not a part: an encoder on one
kind of GPU produces outputs for consumers on another. The parts are published in clear text in
Redis, so `redacted` removes secrets and paths.

Every field of `ModelConfig`, `MultiModalConfig` and `LoRAConfig` counts, except those in
`IGNORED_MODEL`, `IGNORED_MULTIMODAL` and `IGNORED_LORA`. So a field of a later vLLM counts until it
is reviewed. A field that counts needlessly prevents sharing; a field that is ignored by mistake
causes wrong answers. docs/vllm.md has a row for each field.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

from connectors import hub
from connectors.counters import logger
from connectors.identifiers import reach_encoder
from connectors.settings import SharedSettings
from connectors.weights import (
    CHECKPOINT_FORMATS,
    DigestCache,
    HashingStopped,
    WeightsSource,
    combined,
    format_of,
    hash_files,
    weights_source,
)
from lookup_buffer.errors import MissReason
from lookup_buffer.namespace import Namespace

PROTOCOL_VERSION = "1"
CLOSE_SECONDS = 2.0
"""How long `NamespaceTask.close` waits for its thread."""
AT_ONCE_BYTES = 32 << 20
"""Files of at most this size are hashed before the engine starts: some hundredths of a second."""
_CHANGED = "the model's files changed while the engine started"
_DEPTH_MAX = 16
"""Bound on the nesting of values; a deeper value counts only by its type."""

_VOLATILE = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "attn_temperature_tuning"}
)
"""Fields without effect that differ between copies of a model or releases of transformers; and one
that vLLM overwrites when it loads Llama 4, which counts as `positions`."""
_PROCESSOR_FILES = ("*processor*.json", "*feature_extract*.json", "*.py")
"""Files in a model's folder: the processors of media, and the model's own code."""
_VARIABLES = (
    "VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
)  # fmt: skip
"""Environment variables of vLLM. The first two decide which frames of a video are used, while its
name depends on its file only. The others change what the encoder's layers compute."""
_SUMMARY = ("model_type", "hidden_size", "d_model", "image_size", "patch_size", "num_hidden_layers")
_TOWERS = ("vision_config", "audio_config", "thinker_config", "vision_encoder", "audio_encoder")
_DEVICE_BUILD = re.compile(r"(?:cpu|cu\d+|rocm\d*|xpu|tpu|hpu|precompiled)\Z")
"""A label in a release's local version that names the device it was built for."""

_SECRET = re.compile(r"(?:^|[_-])(?:key|token|secret|password|passwd|credentials?|auth)s?$", re.I)
_USER = re.compile(r"(?<=://)[^/@]*@")
_REDACTED_DIGITS = 16

_OWN = "counted in its own part"
_TEXT = "turns text into tokens; names of items and KV chunks cover the result"
_SAMPLING = "chooses tokens, after the last layer"
_GENERATION = f"{_SAMPLING}; `attn_temperature_tuning` counts for KV of Llama 4"
_MEMORY = "how memory is allocated and freed"
_REQUESTS = "which requests are accepted"
_CACHE = "how processed media are cached and passed between vLLM's processes"
_ROLE = "set by vLLM from the connector's role, or by the user for an engine without encoder"
_SCALES = "calibration written for later starts"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Why a field of vLLM's configuration does not count."""

    reason: str
    kv_counts: bool = False
    """Whether it nevertheless counts for KV: it affects the language model, not the encoder."""


IGNORED_MODEL: Final[Mapping[str, Ignored]] = {
    "model": Ignored(f"{_OWN}: `model`"),
    "model_weights": Ignored(f"{_OWN}: `weights`"),
    "revision": Ignored(f"{_OWN}: `revision`, the commit"),
    "code_revision": Ignored(f"{_OWN}: `code_revision`"),
    "dtype": Ignored(f"{_OWN}: `dtype`"),
    "quantization": Ignored(f"{_OWN}: `quantization`"),
    "quantization_config": Ignored(f"{_OWN}: `quantization`"),
    "hf_overrides": Ignored(f"{_OWN}: `hf_overrides`"),
    "hf_config": Ignored(f"{_OWN}: `encoder_config`"),
    "hf_text_config": Ignored("a part of `hf_config`"),
    "hf_config_path": Ignored("its content counts as `encoder_config`"),
    "config_format": Ignored("the configuration read in it counts as `encoder_config`"),
    "model_impl": Ignored(f"{_OWN}: `implementation`, the resulting class"),
    "model_class_overrides": Ignored(f"{_OWN}: `implementation`"),
    "multimodal_config": Ignored("its fields count, see below"),
    "seed": Ignored(f"{_SAMPLING}; counts as `load_format` if it generates the weights"),
    "runner": Ignored("how the output of the last layer is used", kv_counts=True),
    "convert": Ignored("how the output of the last layer is used", kv_counts=True),
    "pooler_config": Ignored("how the output of the last layer is used"),
    "tokenizer": Ignored(_TEXT),
    "tokenizer_mode": Ignored(_TEXT),
    "tokenizer_revision": Ignored(_TEXT),
    "skip_tokenizer_init": Ignored(_TEXT),
    "word_embeddings_untied_by_checkpoint": Ignored(
        "concerns the last layer; vLLM may change it when it loads the weights"
    ),
    "allowed_local_media_path": Ignored(_REQUESTS),
    "allowed_media_domains": Ignored(_REQUESTS),
    "enable_prompt_embeds": Ignored(_REQUESTS),
    "enable_trace_replay": Ignored(_REQUESTS),
    "allow_deprecated_quantization": Ignored("a permission; the method counts as `quantization`"),
    "max_model_len": Ignored(
        "the longest prompt; counts for KV if the position embedding depends on it, and of Llama 4"
    ),
    "spec_target_max_model_len": Ignored("the longest prompt"),
    "disable_sliding_window": Ignored("attention of the language model", kv_counts=True),
    "disable_cascade_attn": Ignored("has no effect any more"),
    "enforce_eager": Ignored("whether the same layers run as CUDA graphs"),
    "return_sampling_mask": Ignored(_SAMPLING),
    "max_logprobs": Ignored(_SAMPLING),
    "logprobs_mode": Ignored(_SAMPLING),
    "use_fp64_gumbel": Ignored(_SAMPLING),
    "logits_processors": Ignored(_SAMPLING),
    "generation_config": Ignored(_GENERATION),
    "override_generation_config": Ignored(_GENERATION),
    "served_model_name": Ignored("a name for clients"),
    "hf_token": Ignored("a secret; the model counts by its content or commit"),
    "enable_sleep_mode": Ignored(_MEMORY),
    "sleep_mode_backend": Ignored(_MEMORY),
    "sleep_mode_offload_cudagraph": Ignored(_MEMORY),
    "sleep_preserve_parameter_names": Ignored(_MEMORY),
    "enable_nccl_comm_suspend": Ignored(_MEMORY),
    "enable_cumem_allocator": Ignored(_MEMORY),
    "renderer_num_workers": Ignored("how many threads prepare requests"),
}
IGNORED_MULTIMODAL: Final[Mapping[str, Ignored]] = {
    "language_model_only": Ignored(_ROLE, kv_counts=True),
    "mm_encoder_only": Ignored(_ROLE),
    "enable_mm_embeds": Ignored(_ROLE),
    "allow_missing_mm_embeddings": Ignored(_ROLE),
    "limit_per_prompt": Ignored(f"{_REQUESTS}, and what is profiled at start"),
    "skip_mm_profiling": Ignored("what is profiled at start"),
    "interleave_mm_strings": Ignored(_TEXT),
    "mm_processor_cache_gb": Ignored(_CACHE),
    "mm_processor_cache_type": Ignored(_CACHE),
    "mm_shm_cache_max_object_size_mb": Ignored(_CACHE),
    "mm_tensor_ipc": Ignored(_CACHE),
    "mm_ipc_gpu_memory_gb": Ignored(_MEMORY),
    "mm_hasher_algorithm": Ignored("part of the items' names"),
    "mm_encoder_tp_mode": Ignored("how ranks divide the encoder's work"),
    "mm_encoder_attn_backend": Ignored("a kernel; vLLM derives it from the device"),
    "mm_encoder_fp8_scale_path": Ignored("its content counts as `mm_encoder_fp8_scales`"),
    "mm_encoder_fp8_scale_save_path": Ignored(_SCALES),
    "mm_encoder_fp8_scale_save_margin": Ignored(_SCALES),
}

IGNORED_LORA: Final[Mapping[str, Ignored]] = {
    "max_lora_rank": Ignored(_REQUESTS),
    "max_loras": Ignored(_MEMORY),
    "max_cpu_loras": Ignored(_MEMORY),
    "fully_sharded_loras": Ignored("how ranks divide the adapters' work"),
    "default_mm_loras": Ignored("which adapter a request gets, which is a part of its keys"),
    "specialize_active_lora": Ignored("which CUDA graphs run the same layers"),
    "max_lora_cls_labels": Ignored("concerns the last layer"),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What is known of an engine's namespace before the model is loaded."""

    parts: dict[str, str]
    """The parts of the namespace, without the weights."""
    weights: WeightsSource


class NamespaceTask:
    """Determines the namespace, on the scheduler side: at once, or on a thread that hashes the
    weights. Logs one line with the namespace, or with the reason why there will be none.

    Args:
        mark: the worker's `WeightsSource.mark` if it runs in another process; empty if not known.
        cache: of digests; None means the user's.
    """

    def __init__(
        self, identity: Identity, *, mark: bytes = b"", cache: DigestCache | None = None
    ) -> None:
        self._identity = identity
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.namespace: Namespace | None = None
        """None until it is known."""
        self.reason = MissReason.NAMESPACE_PENDING
        """Why there is no namespace yet."""
        weights = identity.weights
        if mark not in (b"", weights.mark):
            self._fail(_CHANGED)
        elif weights.unknown:
            self._fail(weights.unknown)
        elif not weights.files:
            self._succeed(weights.version)
        else:
            self._look_up_or_hash(cache or DigestCache())

    def _look_up_or_hash(self, cache: DigestCache) -> None:
        """Determine it at once if all digests are cached or the files are small, else on a
        thread."""
        files = self._identity.weights.files
        known = cache.known(files)
        if all(file.state in known for file in files):
            self._finish(combined(files, known))
            return
        nbytes = sum(file.state[2] for file in files)
        if nbytes <= AT_ONCE_BYTES:
            self._hash(None)
            return
        message = "lookup buffer: hashing %.1f GB of weights; nothing is shared until that is done"
        logger.info(message, nbytes / 1e9)
        self._thread = threading.Thread(
            target=self._hash, args=(cache,), name="lb-weights", daemon=True
        )
        self._thread.start()

    def _hash(self, cache: DigestCache | None) -> None:
        files = self._identity.weights.files
        try:
            self._finish(combined(files, hash_files(files, cache, self._stopped)))
        except HashingStopped:
            pass
        except Exception as error:  # noqa: BLE001 -- after any error the namespace must not stay pending
            self._fail(f"the weights cannot be hashed: {error!r}")

    def _finish(self, digest: str) -> None:
        if self._identity.weights.is_current():
            self._succeed(digest)
        else:
            self._fail(_CHANGED)

    def _succeed(self, weights: str) -> None:
        namespace = Namespace(self._identity.parts | {"weights": weights})
        seconds = time.monotonic() - self._started
        logger.info("lookup buffer: namespace %s, after %.1f s", namespace.fingerprint, seconds)
        self.namespace = namespace

    def _fail(self, why: str) -> None:
        logger.error(
            "lookup buffer: %s; this engine shares nothing. Name its weights by the setting "
            "'weights_version'",
            why,
        )
        self.reason = MissReason.NAMESPACE_UNKNOWN

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)


def engine_identity(vllm_config: Any, settings: SharedSettings) -> Identity:
    """The engine's identity for encoder outputs. Call it before the model is loaded.

    Raises:
        OSError: a file of the model cannot be read; the engine could not load it either.
    """
    source = weights_source(vllm_config, settings.weights_version)
    return Identity(namespace_parts(vllm_config, settings), source)


def cached_identity(owner: Any, name: str, make: Callable[[], Identity]) -> Identity:
    """The identity in attribute `name` of `owner`, an object of vLLM's configuration; the first
    call sets it from `make`.

    Scheduler and worker may share a process and its configuration objects, and a model may change
    its configuration while it loads. So the scheduler reuses the identity that the worker, which
    vLLM creates first, stored before.
    """
    identity: Identity | None = getattr(owner, name, None)
    if identity is None:
        identity = make()
        object.__setattr__(owner, name, identity)
    return identity


def namespace_parts(
    vllm_config: Any, settings: SharedSettings, *, for_kv: bool = False
) -> dict[str, str]:
    """Name and readable value of each part except the weights."""
    model = vllm_config.model_config
    hf_config = _hf_config(model)
    commit = hub.commit_of(model, vllm_config.load_config)
    return {
        "protocol": PROTOCOL_VERSION,
        "vllm": _vllm_version(),
        "transformers": _transformers_version(),
        "model": redacted(hub.repository(str(model.model))),
        "revision": commit or str(getattr(model, "revision", None) or ""),
        "implementation": _implementation(model),
        "code_revision": str(getattr(model, "code_revision", None) or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": _quantization(model, hf_config),
        "hf_overrides": canonical(getattr(model, "hf_overrides", None) or {}),
        "settings": canonical(counted_fields(model, IGNORED_MODEL, for_kv=for_kv)),
        "encoder": _summary(hf_config),
        "encoder_config": _digest(hf_config),
        "processor": _processor(model, for_kv=for_kv),
        "processor_files": "" if commit else _processor_files(model),
        "load_format": _load_format(vllm_config),
        "lora": _lora(vllm_config, for_kv=for_kv),
        "extra": settings.namespace_extra,
    }


def counted_fields(config: Any, ignored: Mapping[str, Ignored], *, for_kv: bool) -> dict[str, Any]:
    """The fields of `config` that count, by name, as plain values, without None and empty
    values."""
    chosen: dict[str, Any] = {}
    for name in _names(config):
        row = ignored.get(name)
        if row is None or (for_kv and row.kv_counts):
            value = plain(getattr(config, name, None))
            if value not in (None, "", {}, []):
                chosen[name] = value
    return chosen


def canonical(value: object) -> str:
    """JSON without secrets and paths; equal for equal values in any order."""
    return json.dumps(redacted(plain(value)), sort_keys=True, separators=(",", ":"))


def plain(value: Any, depth: int = _DEPTH_MAX) -> Any:
    """`value` in JSON's types, the same in every process: no memory addresses, sets sorted."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    if isinstance(value, set | frozenset):
        return sorted((plain(member, depth - 1) for member in value), key=str)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, list | tuple):
        return [plain(member, depth - 1) for member in value]
    if not isinstance(value, Mapping):
        # torch's dtypes and devices have no members; their text describes them.
        members = {name: getattr(value, name, None) for name in _names(value)}
        if not members:
            return str(value)
        value = {"type": type(value).__qualname__, **members}
    return {str(key): plain(member, depth - 1) for key, member in value.items()}


def _names(config: Any) -> list[str]:
    if is_dataclass(config):
        return [field.name for field in fields(config)]
    members = getattr(config, "__dict__", {})
    return [n for n, value in members.items() if not n.startswith("_") and not callable(value)]


def redacted(value: Any) -> Any:
    """`value`, however nested, without secrets and paths; different values stay different.

    A credential, or a value named like one, is replaced by a digest; a path on this machine by its
    last part and a digest.
    """
    if isinstance(value, str):
        return _redacted_text(value)
    if isinstance(value, Mapping):
        return {
            key: _withheld(member) if _SECRET.search(str(key)) else redacted(member)
            for key, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(member) for member in value]
    if isinstance(value, set | frozenset):
        return {redacted(member) for member in value}
    return value


def _redacted_text(text: str) -> str:
    if text.startswith(("/", "~", "file:")):
        name = text.rstrip("/").rpartition("/")[2]
        return f"{name} (path {_short_digest(text)})"
    if _USER.search(text):
        return f"{_USER.sub('', text)} (login {_short_digest(text)})"
    return text


def _withheld(value: Any) -> str:
    return f"(withheld {_short_digest(repr(value))})" if value else ""


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_REDACTED_DIGITS]


def _vllm_version() -> str:
    """vLLM's version without the labels of its device build: the device is not a part."""
    from vllm import __version__

    public, _, local = str(__version__).partition("+")
    kept = [label for label in local.split(".") if label and not _DEVICE_BUILD.match(label)]
    return f"{public}+{'.'.join(kept)}" if kept else public


def _transformers_version() -> str:
    from transformers import __version__

    return str(__version__)


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
    """A readable summary: the architecture and the towers' sizes."""
    shown: dict[str, Any] = {"architectures": hf_config.get("architectures")}
    for tower in _TOWERS:
        values = hf_config.get(tower)
        if isinstance(values, Mapping):
            shown[tower] = {name: values[name] for name in _SUMMARY if name in values}
    return canonical(shown)


def _implementation(model: Any) -> str:
    """The class that vLLM chose for the model: its own, one of transformers, or a plugin's."""
    name = str(getattr(model, "architecture", None) or "")
    replaced = getattr(model, "model_class_overrides", None)
    return canonical({"class": name, "replaced": replaced}) if replaced else name


def _quantization(model: Any, hf_config: Mapping[str, Any]) -> str:
    """The method, and its options if there are any (for example the layers that it skips).

    A quantised checkpoint names its method; vLLM replaces that name by a kernel's, which depends on
    the device. So the checkpoint's name is used.
    """
    own = hf_config.get("quantization_config") or {}
    method = str(own.get("quant_method") or getattr(model, "quantization", None) or "")
    options = getattr(model, "quantization_config", None)
    return canonical({"method": method, "options": options}) if options else method


def _processor(model: Any, *, for_kv: bool) -> str:
    from vllm import envs

    multimodal = getattr(model, "multimodal_config", None)
    settings = counted_fields(multimodal, IGNORED_MULTIMODAL, for_kv=for_kv)
    variables = {name: getattr(envs, name, None) for name in _VARIABLES}
    settings |= {name: value for name, value in variables.items() if value}
    _without_device(settings)
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales:
        settings["mm_encoder_fp8_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return canonical(settings)


def _without_device(settings: dict[str, Any]) -> None:
    """Remove the device that decodes and processes media. On an encode-only engine with a GPU, vLLM
    sets it and a video decoder."""
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
    """A digest of the processor's files in a local folder. A commit identifies those of a
    repository."""
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


def _lora(vllm_config: Any, *, for_kv: bool) -> str:
    """What is made of an adapter here. Which adapter is part of the keys. Empty with vLLM's
    defaults: then an engine without adapters shares what no adapter influences."""
    if not (reach_encoder(vllm_config) or (for_kv and vllm_config.lora_config is not None)):
        return ""
    counted = counted_fields(vllm_config.lora_config, IGNORED_LORA, for_kv=for_kv)
    own_dtype = ("auto", plain(vllm_config.model_config.dtype))
    if counted.get("lora_dtype") in own_dtype:
        del counted["lora_dtype"]
    chosen = {name: sorted(v) if isinstance(v, list) else v for name, v in counted.items() if v}
    return canonical(chosen) if chosen else ""
