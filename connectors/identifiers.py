"""Which item identifiers of vLLM name content, and under which key an item may be shared.

An identifier is normally a hash over the media and the processor settings, or a uuid of the client.
With vLLM's processor cache and prefix cache both off, it is only a counter. A counter does not
depend on the content, and repeats on every instance and after every restart.

For LoRA, vLLM only prefixes the identifier with the adapter's name, and two instances may load
different adapters under one name. So items that an adapter influences are shared under a digest of
its files. `Adapters` reads them on a background thread; until it is done, such items are not
shared.

`payload_of` finds what a request carries for an item: media, embeddings or metadata. The connectors
call this module on vLLM's scheduler thread. Only `MetadataFields` calls vLLM, on first use.
"""

import enum
import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from lookup_buffer.errors import ConfigError, InvalidKey
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".json")
"""Files of an adapter: its weights, its configuration, its embeddings."""
ADAPTERS_MAX: Final = 4096
UNNAMED_MAX: Final = 1 << 16
"""Bound on the names, without an adapter's name, of items that an adapter encoded. When it is
reached, all names without an adapter's are ambiguous and not shared."""
_CHUNK_BYTES: Final = 1 << 20
_SURELY_MEDIA_BYTES = 1024
"""A field of at least this size is no grid, count or list of timestamps."""
_EMBEDDING_SUFFIXES = ("embeds", "embedding", "embeddings")
# Either form may have the prefix `lora_name:`.
_COUNTED_BY_RENDERER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
_COUNTED_IN_REQUEST = re.compile(r"(?:^|:)([^:]+)-(?:image|video|audio|vision_chunk)-\d+$")

_Adapter = tuple[str, int, str, bool]
"""Name, vLLM's number, path, and whether its experts are fused (`is_3d_lora_weight`). An adapter
that is loaded again has a new tuple."""


class NotShareable(Exception):
    """This item must not be shared. The text is the reason, as in a counter's name."""


class ItemPayload(enum.Enum):
    """What a request carries for an item. It decides what the engine can do without another
    engine's output."""

    MEDIA = "media"
    """Encode it here; the output may be stored."""
    EMBEDDINGS = "embeddings"
    """Use the client's embeddings. They are neither stored nor looked up, because nothing verifies
    them."""
    METADATA = "metadata"
    """Nothing: the request needs the output of another engine."""


def shared_key(
    identifier: str, request: Any, adapters: "Adapters", mm_hash: str | None = None
) -> TensorKey:
    """The key, on all instances, of the item that `identifier` names on this one.

    Args:
        mm_hash: the item's name without an adapter's name; None if vLLM does not supply it.

    Raises:
        NotShareable: the identifier may name a different item on another instance.
    """
    if len(identifier) > MAX_KEY_CHARACTERS:  # a client chooses the length
        raise NotShareable("identifier_length")
    if _COUNTED_BY_RENDERER.search(identifier):
        raise NotShareable("identifier_counted")
    counted = _COUNTED_IN_REQUEST.search(identifier)
    # Since 0.14 the scheduler's request id is the client's with a random suffix.
    request_id: str = request.request_id
    if counted and (request_id == counted[1] or request_id.startswith(counted[1] + "-")):
        raise NotShareable("identifier_counted")
    lora: Any = getattr(request, "lora_request", None)
    if not _is_prefixed(identifier, lora, mm_hash):
        if adapters.encode:
            _check_unnamed(identifier, lora, adapters, mm_hash)
        return _key(identifier)
    digest = adapters.digest_of(lora)
    if not digest:
        raise NotShareable("lora")
    # A part of the key, because a client cannot set it by an identifier.
    return _key(identifier.removeprefix(f"{lora.lora_name}:"), part=f"lora-{digest}")


def payload_of(feature: Any, metadata_fields: Callable[[str], set[str]]) -> ItemPayload:
    """What the fields of one `MultiModalFeatureSpec` contain.

    Args:
        feature: the item, with `modality` and `data`.
        metadata_fields: returns the names of the modality's metadata fields. Called only if the
            other rules do not decide, as it may build the model's processor.
    """
    if feature.modality == "prompt_embeds":
        return ItemPayload.EMBEDDINGS
    data: Mapping[str, Any] | None = feature.data
    if not data:
        return ItemPayload.METADATA
    values = {name: getattr(field, "data", None) for name, field in data.items()}
    present = {name: value for name, value in values.items() if value is not None}
    if any(name.endswith(_EMBEDDING_SUFFIXES) for name in present):
        return ItemPayload.EMBEDDINGS
    # vLLM's renderer also passes the fields that stay on the CPU, which may be large: the times of
    # all frames of a video. No model keeps its media there. A chat request refers to a modality
    # without metadata fields only if it carries the media.
    stays = {name for name in present if _stays_on_cpu(data[name])}
    moved = present.keys() - stays
    if any(getattr(present[name], "nbytes", 0) >= _SURELY_MEDIA_BYTES for name in moved):
        return ItemPayload.MEDIA
    if not moved or moved <= metadata_fields(feature.modality):
        return ItemPayload.METADATA
    return ItemPayload.MEDIA


class Adapters:
    """Digests of adapters. Each is read once, because vLLM loads it once; later changes of its
    files have no effect.

    Args:
        encode: whether adapters influence encoder outputs.
        mixed: whether vLLM may use KV of one adapter for another one of the same name.
    """

    def __init__(self, *, encode: bool = False, mixed: bool = False) -> None:
        self.encode = encode
        self.mixed = mixed
        self._unnamed: set[str] = set()
        self._lock = threading.Lock()
        self._digests: dict[_Adapter, str] = {}
        """Empty while the adapter is being read, and permanently if reading it failed."""
        self._unread: deque[_Adapter] = deque()
        self._reader: threading.Thread | None = None
        self._paths: dict[str, str | None] = {}
        """Of each name the path of its adapters; None if they have several. vLLM names an item by
        the adapter's name, so its encoder cache may give one the output of another."""
        self._replaced: set[str] = set()
        """Names of adapters that were changed in place; the engine may have outputs of both
        versions."""

    def digest_of(self, lora_request: Any) -> str:
        """The digest of a request's adapter; empty while it is not known. Never blocks."""
        name: str = lora_request.lora_name
        path = str(lora_request.lora_path)
        is_fused = bool(getattr(lora_request, "is_3d_lora_weight", False))
        adapter = (name, int(lora_request.lora_int_id), path, is_fused)
        with self._lock:
            if getattr(lora_request, "load_inplace", False):
                self._replaced.add(name)
            if name in self._replaced:
                return ""
            if len(self._paths) < ADAPTERS_MAX and self._paths.setdefault(name, path) != path:
                self._paths[name] = None
            known = self._digests.get(adapter)
            if known is not None or len(self._digests) >= ADAPTERS_MAX:
                return known or ""
            self._digests[adapter] = ""
            self._unread.append(adapter)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="lb-adapter", daemon=True)
                self._reader.start()
        return ""

    def is_reused(self, name: str) -> bool:
        """Whether several adapters had this name."""
        return self._paths.get(name, "") is None or len(self._paths) >= ADAPTERS_MAX

    def encoded_unnamed(self, identifier: str) -> None:
        """Record that a request with an adapter has an identifier without the adapter's name, as
        from vLLM's Rust front end. From now on, vLLM's own caches may have outputs of any adapter
        under it."""
        if len(self._unnamed) < UNNAMED_MAX:
            self._unnamed.add(identifier)

    def is_ambiguous(self, identifier: str) -> bool:
        """Whether this name may be that of an adapter's output."""
        return identifier in self._unnamed or len(self._unnamed) >= UNNAMED_MAX

    def _read(self) -> None:
        """The thread: reads adapters until none is left."""
        while True:
            with self._lock:
                if not self._unread:
                    self._reader = None
                    return
                adapter = self._unread.popleft()
            *_, path, is_fused = adapter
            digest = content_digest(Path(path))
            if digest and is_fused:
                digest += "-fused"
            with self._lock:
                self._digests[adapter] = digest


class MetadataFields:
    """The processed fields of a modality that only size the placeholder, as vLLM names them.
    Imports vLLM on first use."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._resolver: Any = None

    def fields_for(self, modality: str) -> set[str]:
        if self._resolver is None:
            try:
                from vllm.distributed.ec_transfer.ec_connector.utils import (
                    PlaceholderMetadataResolver,
                )
            except ImportError:
                return set()  # a vLLM without it has no metadata-only requests
            self._resolver = PlaceholderMetadataResolver(self._model_config)
        fields: set[str] = self._resolver.fields_for(modality)
        return fields

    def report(self, features: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """By identifier, the metadata with which a later request can refer to an item without its
        media. The format is that of vLLM's own connectors, so their routers can read it. Empty for
        a vLLM without that function."""
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        except ImportError:
            return {}
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items


def reach_encoder(vllm_config: Any) -> bool:
    """Whether LoRA adapters influence encoder outputs in this engine."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "enable_tower_connector_lora", False))


def mixes_adapters(vllm_config: Any) -> bool:
    """Whether vLLM's prefix cache knows adapters by their names only, as before vLLM 0.31: there a
    prompt may go on with KV of another adapter of that name, or of no adapter with a cache salt of
    that text. True if it cannot be told."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None or not vllm_config.cache_config.enable_prefix_caching:
        return False
    try:
        from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
    except ImportError:
        return True
    adapter = SimpleNamespace(lora_name="name", lora_path="path")
    keys: Any = _gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter))
    return "path" not in str(keys)


def validate_identifiers(vllm_config: Any) -> None:
    """Refuse an engine whose identifiers are counters.

    Raises:
        ConfigError: vLLM's processor cache and prefix caching are both off.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 4) != 0:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "mm_processor_cache_gb is 0 and prefix caching is off: vLLM then names items by a "
            "counter (renderer0-mm-1-image-0) that repeats on every instance, so different images "
            "would have one key; allowed: mm_processor_cache_gb > 0, or enable_prefix_caching"
        )


def content_digest(folder: Path) -> str:
    """A digest of all files of an adapter; empty if they cannot be read, or change meanwhile.

    Also empty for a path that is no folder on this host (a name on a hub, a tensorizer URI).
    """
    try:
        before = _files(folder)
        if not any(path.suffix != ".json" for path, _, _ in before):
            return ""
        digest = hashlib.sha256()
        for path, nbytes, _ in before:
            digest.update(f"{path.name}:{nbytes}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest() if _files(folder) == before else ""
    except (OSError, ValueError):  # ValueError: a path with a null character
        return ""


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Path, size in bytes and mtime in ns of each file that belongs to the adapter, by path."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            state = path.stat()
            found.append((path, state.st_size, state.st_mtime_ns))
    return found


def _is_prefixed(identifier: str, lora: Any, mm_hash: str | None) -> bool:
    """Whether the identifier begins with the name of the request's adapter."""
    if lora is None:
        return False
    prefix: str = lora.lora_name + ":"
    return identifier == prefix + mm_hash if mm_hash else identifier.startswith(prefix)


def _check_unnamed(identifier: str, lora: Any, adapters: Adapters, mm_hash: str | None) -> None:
    """Refuse an identifier without an adapter's name if it may be that of an adapter's output.
    Called only if adapters influence outputs.

    Raises:
        NotShareable: an adapter may have influenced the output.
    """
    if lora is not None:
        adapters.encoded_unnamed(identifier)
    is_of_another = lora is None and bool(mm_hash) and identifier != mm_hash
    if is_of_another or adapters.is_ambiguous(identifier):
        raise NotShareable("lora")


def _key(identifier: str, part: str = "") -> TensorKey:
    try:
        return TensorKey(identifier, part=part)
    except InvalidKey as error:  # empty, or too long after escaping
        raise NotShareable("identifier_length") from error


def _stays_on_cpu(element: Any) -> bool:
    return bool(getattr(getattr(element, "field", None), "keep_on_cpu", False))
