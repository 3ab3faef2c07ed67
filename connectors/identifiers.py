"""Which of vLLM's item identifiers name content, and under which key it may be shared.

Any thread. An identifier is normally a hash over the media and the processor
settings, or a client's uuid. With vLLM's processor cache and its prefix cache both off it is only a
counter, which says nothing about the content and repeats on every instance and after every restart.

LoRA adapters by content.

vLLM puts only an adapter's name in front of an item's identifier, and two instances may load
different adapters under one name. So what an adapter had a part in is shared under a digest of its
files. Reading them takes a moment, on a thread of this module's; until then such items are not
shared.

What a request carries for one multimodal item: media to encode, embeddings, or only metadata.

Pure but for one lazy question to vLLM about the model's metadata fields. Scheduler thread.
"""

import enum
import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lookup_buffer.errors import ConfigError, InvalidKey
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".json")
"""Files that make an adapter: its weights, its configuration, its embeddings."""
ADAPTERS_MAX: Final = 4096
UNNAMED_MAX: Final = 1 << 16
"""Of items that adapters encoded under names without the adapter's; beyond, no item is shared."""
_CHUNK_BYTES: Final = 1 << 20

_Adapter = tuple[str, int, str]
"""Name, vLLM's number and path: a new one where an adapter is loaded again under its name."""


def reach_encoder(vllm_config: Any) -> bool:
    """Whether a request's adapter has a part in what its media are encoded to."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "enable_tower_connector_lora", False))


class Adapters:
    """Digests of adapters, each read once: as vLLM loads it, what lies there later is no matter.

    Args:
        encode: whether they have a part in encoder outputs.
    """

    def __init__(self, *, encode: bool = False) -> None:
        self.encode = encode
        self._unnamed: set[str] = set()
        self._lock = threading.Lock()
        self._digests: dict[_Adapter, str] = {}
        """Empty while it is being read, and for ever where that did not succeed."""
        self._unread: deque[_Adapter] = deque()
        self._reader: threading.Thread | None = None
        self._replaced: set[str] = set()
        """Names of adapters that were changed in place: the engine may hold outputs of both."""

    def digest_of(self, lora_request: Any) -> str:
        """The digest of a request's adapter, empty where it is not known (yet). Never waits."""
        name: str = lora_request.lora_name
        adapter = (name, int(lora_request.lora_int_id), str(lora_request.lora_path))
        with self._lock:
            if getattr(lora_request, "load_inplace", False):
                self._replaced.add(name)
            if name in self._replaced:
                return ""
            known = self._digests.get(adapter)
            if known is not None or len(self._digests) >= ADAPTERS_MAX:
                return known or ""
            self._digests[adapter] = ""
            self._unread.append(adapter)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="lb-adapter", daemon=True)
                self._reader.start()
        return ""

    def encoded_unnamed(self, identifier: str) -> None:
        """A request with an adapter calls an item by a name without it, as vLLM's Rust front end
        does: from now on vLLM's own caches may have outputs of any adapter under it."""
        if len(self._unnamed) < UNNAMED_MAX:
            self._unnamed.add(identifier)

    def is_ambiguous(self, identifier: str) -> bool:
        """Whether vLLM may mean the output of some adapter by this name."""
        return identifier in self._unnamed or len(self._unnamed) >= UNNAMED_MAX

    def _read(self) -> None:
        """Until nothing is left to be read."""
        while True:
            with self._lock:
                if not self._unread:
                    self._reader = None
                    return
                adapter = self._unread.popleft()
            digest = content_digest(Path(adapter[2]))
            with self._lock:
                self._digests[adapter] = digest


def content_digest(folder: Path) -> str:
    """A digest of all files of an adapter; empty where they cannot be read, or change meanwhile.

    What is not a folder of this host (a name on a hub, a tensorizer URI) has none.
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
    except (OSError, ValueError):  # no file has a name with a zero in it
        return ""


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Path, size and time of change of each file that counts."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            state = path.stat()
            found.append((path, state.st_size, state.st_mtime_ns))
    return found


# `lora_name:` may stand in front of either form.
_COUNTED_BY_RENDERER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
_COUNTED_IN_REQUEST = re.compile(r"(?:^|:)([^:]+)-(?:image|video|audio|vision_chunk)-\d+$")


class NotShareable(Exception):
    """This item must stay on this instance. The text is a counter's name."""


def shared_key(
    identifier: str, request: Any, adapters: Adapters, mm_hash: str | None = None
) -> TensorKey:
    """The key under which all instances know what `identifier` names on this one.

    Args:
        mm_hash: the item's name without an adapter's, where the host says it.

    Raises:
        NotShareable: it may name something else on another instance.
    """
    if len(identifier) > MAX_KEY_CHARACTERS:  # a client's name may be of any length
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
            _refuse_unnamed(identifier, lora, adapters, mm_hash)
        return _key(identifier)
    # The prefix is the adapter's name, and two instances may load different adapters under one.
    digest = adapters.digest_of(lora)
    if not digest:
        raise NotShareable("lora")
    # A part, which nobody can write into an identifier of his own.
    return _key(identifier.removeprefix(f"{lora.lora_name}:"), part=f"lora-{digest}")


def _is_prefixed(identifier: str, lora: Any, mm_hash: str | None) -> bool:
    """Whether the adapter of the request stands in front of the item's name."""
    if lora is None:
        return False
    prefix: str = lora.lora_name + ":"
    return identifier == prefix + mm_hash if mm_hash else identifier.startswith(prefix)


def _refuse_unnamed(identifier: str, lora: Any, adapters: Adapters, mm_hash: str | None) -> None:
    """Adapters have a part in outputs, and this name says of none that it had.

    Raises:
        NotShareable: one may have had it all the same.
    """
    if lora is not None:
        adapters.encoded_unnamed(identifier)
    is_of_another = lora is None and bool(mm_hash) and identifier != mm_hash
    if is_of_another or adapters.is_ambiguous(identifier):
        raise NotShareable("lora")


def _key(identifier: str, part: str = "") -> TensorKey:
    try:
        return TensorKey(identifier, part=part)
    except InvalidKey as error:  # empty, or too long once it is escaped
        raise NotShareable("identifier_length") from error


def refuse_counted_identifiers(vllm_config: Any) -> None:
    """Refuse a host whose identifiers are counters.

    Raises:
        ConfigError: vLLM's processor cache and prefix caching are both off.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 4) != 0:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "mm_processor_cache_gb is 0 and prefix caching is off: vLLM then names items by a "
            "counter (renderer0-mm-1-image-0) that repeats on every instance, and images would be "
            "mixed up; allowed: mm_processor_cache_gb > 0, or enable_prefix_caching"
        )


# A field with at least so many bytes is no grid, count or list of timestamps.
_SURELY_MEDIA_BYTES = 1024
_EMBEDDING_SUFFIXES = ("embeds", "embedding", "embeddings")


class Carried(enum.Enum):
    """What the engine could do with the item if nobody else had encoded it."""

    MEDIA = "media"
    """Encode it here; the output may be stored."""
    EMBEDDINGS = "embeddings"
    """Use what the client supplied. Never stored, never looked up: it is not ours to vouch for."""
    METADATA = "metadata"
    """Nothing: the request can only run with bytes from elsewhere."""


def carried_by(feature: Any, metadata_fields: Callable[[str], set[str]]) -> Carried:
    """Look at the fields of one `MultiModalFeatureSpec`.

    Args:
        feature: the item, with `modality` and `data`.
        metadata_fields: names of the modality's metadata fields, asked only in doubt (it may build
            the model's processor).
    """
    if feature.modality == "prompt_embeds":
        return Carried.EMBEDDINGS
    data: Mapping[str, Any] | None = feature.data
    if not data:
        return Carried.METADATA
    values = {name: getattr(field, "data", None) for name, field in data.items()}
    present = {name: value for name, value in values.items() if value is not None}
    if any(name.endswith(_EMBEDDING_SUFFIXES) for name in present):
        return Carried.EMBEDDINGS
    if any(getattr(value, "nbytes", 0) >= _SURELY_MEDIA_BYTES for value in present.values()):
        return Carried.MEDIA
    # vLLM's renderer hands on the fields that stay on the CPU, too. A modality without fields of
    # its own cannot be asked for in a chat without its media.
    sizes = {name for name in present if _stays_on_cpu(data[name])}
    if present.keys() <= sizes or present.keys() <= sizes | metadata_fields(feature.modality):
        return Carried.METADATA
    return Carried.MEDIA


def _stays_on_cpu(element: Any) -> bool:
    return bool(getattr(getattr(element, "field", None), "keep_on_cpu", False))


class MetadataFields:
    """Asks vLLM once per modality which processed fields only size the placeholder."""

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
                return set()  # hosts without it have no metadata-only requests either
            self._resolver = PlaceholderMetadataResolver(self._model_config)
        fields: set[str] = self._resolver.fields_for(modality)
        return fields

    def report(self, features: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """By identifier, what a request needs that shall carry an item without its media; in the
        form of vLLM's own connectors, so that their routers understand it."""
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        except ImportError:
            return {}
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items
