"""The namespace of an engine: all that encoder outputs depend on and item hashes do not hold.

Made once per connector from vLLM's configuration, before the model is loaded. The weights' part
follows: at once, or when `NamespaceTask` has hashed the files, on a thread. `NamespaceTask` belongs
to the scheduler side. The device is no part: an encoder on one kind of GPU makes outputs for
consumers on another. The parts are published in clear text, so they hold no secret and no path (see
`settings.disclosed`).

Every field of `ModelConfig` and `MultiModalConfig` counts, except those in `IGNORED_MODEL` and
`IGNORED_MULTIMODAL`. So a field of a later vLLM counts until it has been reviewed. A field that
counts without need costs sharing; one that is left out by mistake gives wrong answers. docs/vllm.md
has a row for each name.
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
from connectors.settings import SharedSettings, disclosed
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


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field of vLLM's configuration that does not count, with the reason."""

    reason: str
    kv_counts: bool = False
    """Whether it nevertheless counts for KV: it affects the language model, not the encoder."""


_OWN = "counts by a part of its own"
_TEXT = "makes tokens of text; items and chunks of KV are named by what comes out"
_SAMPLING = "chooses among tokens, behind the last layer"
_MEMORY = "where memory comes from and when it is given back"
_REQUESTS = "which requests are accepted"
_CACHE = "how processed media are kept and passed on between vLLM's processes"
_ROLE = "vLLM sets it by the connector's role, or the user to spare an engine its encoder"
_SCALES = "calibration that is written for later starts"
_DEPTH_MAX = 16
"""Bound on the nesting of values; a deeper value counts only by its type."""

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
    "hf_config_path": Ignored("what is read from it counts as `encoder_config`"),
    "config_format": Ignored("what is read in it counts as `encoder_config`"),
    "model_impl": Ignored(f"{_OWN}: `implementation`, the class that it leads to"),
    "model_class_overrides": Ignored(f"{_OWN}: `implementation`"),
    "multimodal_config": Ignored("its fields count, see below"),
    "seed": Ignored(f"{_SAMPLING}; counts as `load_format` where it makes the weights"),
    "runner": Ignored("what becomes of the last layer's output", kv_counts=True),
    "convert": Ignored("what becomes of the last layer's output", kv_counts=True),
    "pooler_config": Ignored("what becomes of the last layer's output"),
    "tokenizer": Ignored(_TEXT),
    "tokenizer_mode": Ignored(_TEXT),
    "tokenizer_revision": Ignored(_TEXT),
    "skip_tokenizer_init": Ignored(_TEXT),
    "word_embeddings_untied_by_checkpoint": Ignored(
        "of the last layer; vLLM may change it when the weights are loaded"
    ),
    "allowed_local_media_path": Ignored(_REQUESTS),
    "allowed_media_domains": Ignored(_REQUESTS),
    "enable_prompt_embeds": Ignored(_REQUESTS),
    "enable_trace_replay": Ignored(_REQUESTS),
    "allow_deprecated_quantization": Ignored("a permission; the method counts as `quantization`"),
    "max_model_len": Ignored("how long a prompt may be; for KV it counts where positions need it"),
    "spec_target_max_model_len": Ignored("how long a prompt may be"),
    "disable_sliding_window": Ignored("attention of the language model", kv_counts=True),
    "disable_cascade_attn": Ignored("has no effect any more"),
    "enforce_eager": Ignored("whether the same layers run as CUDA graphs"),
    "return_sampling_mask": Ignored(_SAMPLING),
    "max_logprobs": Ignored(_SAMPLING),
    "logprobs_mode": Ignored(_SAMPLING),
    "use_fp64_gumbel": Ignored(_SAMPLING),
    "logits_processors": Ignored(_SAMPLING),
    "generation_config": Ignored(_SAMPLING),
    "override_generation_config": Ignored(_SAMPLING),
    "served_model_name": Ignored("a name for clients"),
    "hf_token": Ignored("a secret; what it gives access to counts by content or commit"),
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
    "mm_hasher_algorithm": Ignored("stands in the items' names"),
    "mm_encoder_tp_mode": Ignored("which rank computes what of the encoder"),
    "mm_encoder_attn_backend": Ignored("a kernel; vLLM derives it from the device"),
    "mm_encoder_fp8_scale_path": Ignored("its content counts, as `mm_encoder_fp8_scales`"),
    "mm_encoder_fp8_scale_save_path": Ignored(_SCALES),
    "mm_encoder_fp8_scale_save_margin": Ignored(_SCALES),
}


def counted(config: Any, ignored: Mapping[str, Ignored], *, for_kv: bool) -> dict[str, Any]:
    """The fields of `config` that count, by name, as plain values. None and empty ones are left
    out."""
    chosen: dict[str, Any] = {}
    for name in _names(config):
        row = ignored.get(name)
        if row is None or (for_kv and row.kv_counts):
            value = plain(getattr(config, name, None))
            if value not in (None, "", {}, []):
                chosen[name] = value
    return chosen


def _names(config: Any) -> list[str]:
    if is_dataclass(config):
        return [field.name for field in fields(config)]
    members = getattr(config, "__dict__", {})
    return [n for n, value in members.items() if not n.startswith("_") and not callable(value)]


def plain(value: Any, depth: int = _DEPTH_MAX) -> Any:
    """`value` in JSON's own types, the same in every process: without addresses, sets sorted."""
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


CLOSE_SECONDS = 2.0
AT_ONCE_BYTES = 32 << 20
"""Up to this size, files are hashed before the engine starts: a few hundredths of a second."""
_CHANGED = "the model's files changed while the engine started"


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies an engine, as far as it is known before the model is loaded."""

    parts: dict[str, str]
    """The parts of the namespace, without the weights."""
    weights: WeightsSource


def remembered(owner: Any, name: str, make: Callable[[], Identity]) -> Identity:
    """What `make` returned the first time for this object of vLLM's configuration.

    Scheduler and worker may share a process, and then the configuration's objects too. A model may
    change its own configuration while it loads. So the worker, which is made first, leaves its
    identity on the object.
    """
    identity: Identity | None = getattr(owner, name, None)
    if identity is None:
        identity = make()
        object.__setattr__(owner, name, identity)
    return identity


class NamespaceTask:
    """Determines the namespace, on the scheduler side: at once, or on a thread when the weights
    have been hashed. Logs one line with the namespace, or with the reason why there will be none.

    `close` ends the hashing.

    Args:
        mark: the worker's `WeightsSource.mark` where it runs in another process; empty where it is
            not known.
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
        """Why the namespace is not known."""
        weights = identity.weights
        if mark not in (b"", weights.mark):
            self._fail(_CHANGED)
        elif weights.unknown:
            self._fail(weights.unknown)
        elif not weights.files:
            self._know(weights.version)
        else:
            self._begin(cache or DigestCache())

    def _begin(self, cache: DigestCache) -> None:
        """Hash at once where all digests are cached or the files are small, else on a thread."""
        files = self._identity.weights.files
        known = cache.known(files)
        if all(file.state in known for file in files):
            self._settle(combined(files, known))
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
            self._settle(combined(files, hash_files(files, cache, self._stopped)))
        except HashingStopped:
            pass
        except Exception as error:  # noqa: BLE001 -- after any error the namespace must not stay pending
            self._fail(f"the weights cannot be hashed: {error!r}")

    def _settle(self, digest: str) -> None:
        if self._identity.weights.is_current():
            self._know(digest)
        else:
            self._fail(_CHANGED)

    def _know(self, weights: str) -> None:
        namespace = Namespace(self._identity.parts | {"weights": weights})
        seconds = time.monotonic() - self._started
        logger.info("lookup buffer: namespace %s, after %.1f s", namespace.fingerprint, seconds)
        self.namespace = namespace

    def _fail(self, why: str) -> None:
        logger.error(
            "lookup buffer: %s; this engine shares nothing. Setting 'weights_version' names the "
            "weights where nothing else does",
            why,
        )
        self.reason = MissReason.NAMESPACE_UNKNOWN

    def close(self) -> None:
        """Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)


PROTOCOL_VERSION = "1"
# Fields that differ between copies of one model, or between transformers' releases, without effect.
_VOLATILE = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_PROCESSOR_FILES = ("*processor*.json", "*feature_extract*.json", "*.py")
"""Files in a model's folder: how media become the encoder's input, and the model's own code."""
# Variables of vLLM's environment. A video is named by the file that the client sent, whichever
# frames are taken from it; the other variables change what the encoder's layers compute.
_VARIABLES = (
    "VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
)  # fmt: skip
_SUMMARY = ("model_type", "hidden_size", "d_model", "image_size", "patch_size", "num_hidden_layers")
_TOWERS = ("vision_config", "audio_config", "thinker_config", "vision_encoder", "audio_encoder")
_DEVICE_BUILD = re.compile(r"(?:cpu|cu\d+|rocm\d*|xpu|tpu|hpu|precompiled)\Z")
"""A label in a release's local version that names the device it was built for."""


def engine_identity(vllm_config: Any, settings: SharedSettings) -> Identity:
    """The engine's identity for encoder outputs. Call it before the model is loaded.

    Raises:
        OSError: a file of the model cannot be read; the engine could not load it either.
    """
    source = weights_source(vllm_config, settings.weights_version)
    return Identity(namespace_parts(vllm_config, settings), source)


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
    """vLLM's version without the labels of its device build: the device is no part."""
    from vllm import __version__

    public, _, local = str(__version__).partition("+")
    kept = [label for label in local.split(".") if label and not _DEVICE_BUILD.match(label)]
    return f"{public}+{'.'.join(kept)}" if kept else public


def _transformers_version() -> str:
    from transformers import __version__

    return str(__version__)


def canonical(value: object) -> str:
    """JSON that is equal for equal values, whatever their order, without secrets and paths."""
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
    """A readable summary: the architecture and the towers' sizes."""
    shown: dict[str, Any] = {"architectures": hf_config.get("architectures")}
    for tower in _TOWERS:
        values = hf_config.get(tower)
        if isinstance(values, Mapping):
            shown[tower] = {name: values[name] for name in _SUMMARY if name in values}
    return canonical(shown)


def _implementation(model: Any) -> str:
    """The class that vLLM chose for the model: vLLM's own, one of transformers, or a plugin's."""
    name = str(getattr(model, "architecture", None) or "")
    replaced = getattr(model, "model_class_overrides", None)
    return canonical({"class": name, "replaced": replaced}) if replaced else name


def _quantization(model: Any, hf_config: Mapping[str, Any]) -> str:
    """The method, and its options where there are any (what it leaves out, for example).

    A quantised checkpoint names its method itself. That name is used: vLLM replaces it by a
    kernel's name, which depends on the device.
    """
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
    """Remove the device on which media are decoded and processed. On an encode-only engine with a
    GPU vLLM sets it itself, together with a decoder of videos."""
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
    """A digest of the processor's files in a local folder. Those of a repository are identified by
    its commit."""
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
    """Whether adapters influence the encoder. The adapter itself is part of an item's
    identifier."""
    if not reach_encoder(vllm_config):
        return ""
    dtype = getattr(vllm_config.lora_config, "lora_dtype", "")
    return canonical({"tower": True, "dtype": str(dtype)})
