"""Which item identifiers of vLLM name content, and under which key an item may be shared.

An identifier is normally a hash over the media and the processor settings, or a uuid of the client.
With vLLM's processor cache and its prefix cache both off it is only a counter. A counter says
nothing about the content, and repeats on every instance and after every restart.

For LoRA, vLLM only puts the adapter's name in front of the identifier, and two instances may load
different adapters under one name. So items that an adapter influences are shared under a digest of
its files. `Adapters` reads them on a thread of its own; until that ends such items are not shared.

Also here: what a request carries for an item (media, embeddings, metadata). The connectors call
this on vLLM's scheduler thread; only `MetadataFields` and its resolver query vLLM, lazily.
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
"""Files of an adapter: its weights, its configuration, its embeddings."""
ADAPTERS_MAX: Final = 4096
UNNAMED_MAX: Final = 1 << 16
"""Bound on items that adapters encoded under names without the adapter's name. Once it is reached,
every name without an adapter's is ambiguous and not shared."""
_CHUNK_BYTES: Final = 1 << 20

_Adapter = tuple[str, int, str]
"""Name, vLLM's number and path. Loading an adapter again under its name gives a new tuple."""


def reach_encoder(vllm_config: Any) -> bool:
    """Whether LoRA adapters influence encoder outputs in this engine."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "enable_tower_connector_lora", False))


class Adapters:
    """Digests of adapters. Each is read once, as vLLM loads it once; later changes of its files do
    not matter.

    Args:
        encode: whether adapters influence encoder outputs.
    """

    def __init__(self, *, encode: bool = False) -> None:
        self.encode = encode
        self._unnamed: set[str] = set()
        self._lock = threading.Lock()
        self._digests: dict[_Adapter, str] = {}
        """Empty while the adapter is being read, and for ever where reading it failed."""
        self._unread: deque[_Adapter] = deque()
        self._reader: threading.Thread | None = None
        self._replaced: set[str] = set()
        """Names of adapters that were changed in place: the engine may hold outputs of the old and
        of the new one."""

    def digest_of(self, lora_request: Any) -> str:
        """The digest of a request's adapter; empty while it is not known. Never waits."""
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
        """Record that a request with an adapter names an item without the adapter, as vLLM's Rust
        front end does. From now on vLLM's own caches may hold outputs of any adapter under that
        name."""
        if len(self._unnamed) < UNNAMED_MAX:
            self._unnamed.add(identifier)

    def is_ambiguous(self, identifier: str) -> bool:
        """Whether this name may stand for the output of some adapter."""
        return identifier in self._unnamed or len(self._unnamed) >= UNNAMED_MAX

    def _read(self) -> None:
        """The thread: reads adapters until none is left."""
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

    It is also empty for a path that is no folder of this host (a name on a hub, a tensorizer URI).
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


# `lora_name:` may stand in front of either form.
_COUNTED_BY_RENDERER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
_COUNTED_IN_REQUEST = re.compile(r"(?:^|:)([^:]+)-(?:image|video|audio|vision_chunk)-\d+$")


class NotShareable(Exception):
    """This item must stay on this instance. The text is the reason, part of a counter's name."""


def shared_key(
    identifier: str, request: Any, adapters: Adapters, mm_hash: str | None = None
) -> TensorKey:
    """The key that stands, on all instances, for what `identifier` names on this one.

    Args:
        mm_hash: the item's name without an adapter's name, where the host supplies it.

    Raises:
        NotShareable: the identifier may name something else on another instance.
    """
    if len(identifier) > MAX_KEY_CHARACTERS:  # a client may choose any length
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
    # The prefix is the adapter's name, and instances may load different adapters under one name.
    digest = adapters.digest_of(lora)
    if not digest:
        raise NotShareable("lora")
    # A part of the key: no client can write it into an identifier.
    return _key(identifier.removeprefix(f"{lora.lora_name}:"), part=f"lora-{digest}")


def _is_prefixed(identifier: str, lora: Any, mm_hash: str | None) -> bool:
    """Whether the identifier begins with the name of the request's adapter."""
    if lora is None:
        return False
    prefix: str = lora.lora_name + ":"
    return identifier == prefix + mm_hash if mm_hash else identifier.startswith(prefix)


def _refuse_unnamed(identifier: str, lora: Any, adapters: Adapters, mm_hash: str | None) -> None:
    """Refuse a name without an adapter that may stand for an adapter's output. Called only where
    adapters influence outputs.

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
    except InvalidKey as error:  # empty, or too long once it is escaped
        raise NotShareable("identifier_length") from error


def refuse_counted_identifiers(vllm_config: Any) -> None:
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
            "counter (renderer0-mm-1-image-0) that repeats on every instance, and images would be "
            "mixed up; allowed: mm_processor_cache_gb > 0, or enable_prefix_caching"
        )


# A field of at least this size is no grid, count or list of timestamps.
_SURELY_MEDIA_BYTES = 1024
_EMBEDDING_SUFFIXES = ("embeds", "embedding", "embeddings")


class Carried(enum.Enum):
    """What the engine can do with the item if no other engine has encoded it."""

    MEDIA = "media"
    """Encode it here; the output may be stored."""
    EMBEDDINGS = "embeddings"
    """Use what the client supplied. Never stored and never looked up: its content is not
    verified."""
    METADATA = "metadata"
    """Nothing: the request can only run with an output from another engine."""


def carried_by(feature: Any, metadata_fields: Callable[[str], set[str]]) -> Carried:
    """What the fields of one `MultiModalFeatureSpec` contain.

    Args:
        feature: the item, with `modality` and `data`.
        metadata_fields: returns the names of the modality's metadata fields. Called only in doubt,
            as it may build the model's processor.
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
    # vLLM's renderer also passes on the fields that stay on the CPU. A chat cannot refer to a
    # modality without fields of its own unless it carries the media.
    sizes = {name for name in present if _stays_on_cpu(data[name])}
    if present.keys() <= sizes or present.keys() <= sizes | metadata_fields(feature.modality):
        return Carried.METADATA
    return Carried.MEDIA


def _stays_on_cpu(element: Any) -> bool:
    return bool(getattr(getattr(element, "field", None), "keep_on_cpu", False))


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
        """By identifier, what a later request needs in order to carry an item without its media.
        The form is that of vLLM's own connectors, so their routers can read it. Empty for a vLLM
        without that function."""
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        except ImportError:
            return {}
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items
