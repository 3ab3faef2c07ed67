"""Which commit of a hub's repository an engine runs.

Read from vLLM's configuration and from the download cache of huggingface_hub:

    <cache>/models--ORG--NAME/refs/<revision>       the commit that a branch or tag stood for
    <cache>/models--ORG--NAME/snapshots/<commit>/   its files

With the hub offline vLLM replaces the model's id by the snapshot's path, so both forms name one
model. Runs in vLLM's processes at start; holds no state. Imports vLLM and huggingface_hub only
inside the functions that need them.
"""

import functools
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

_SNAPSHOT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([0-9a-f]{40})/?\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_SEPARATOR = "--"
"""Separates organisation and name; no id of a repository contains it."""
_OURS = "_lookup_buffer_by_repository"


class Snapshot(NamedTuple):
    repository: str
    """As the hub writes it: ORG/NAME."""
    commit: str


def snapshot_at(path: str) -> Snapshot | None:
    """Repository and commit of the path of a snapshot in a hub's cache; None for any other text."""
    match = _SNAPSHOT.match(path)
    return match and Snapshot(match[1].replace(_SEPARATOR, "/"), match[2])


def repository(model: str) -> str:
    """ORG/NAME for the path of a snapshot; any other text unchanged."""
    snapshot = snapshot_at(model)
    return snapshot.repository if snapshot else model


def hash_by_repository() -> None:
    """Patch vLLM to use ORG/NAME in the hash of an item if the model is a snapshot's path.

    vLLM does so if the model is an id. Without the patch, one image has two names: one in engines
    with the hub online, one in engines with the hub offline. Idempotent. A vLLM that hashes
    differently is not patched.
    """
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs

        original = ProcessorInputs.get_mm_hashes
    except (ImportError, AttributeError):
        return
    if hasattr(original, _OURS) or list(inspect.signature(original).parameters)[1] != "model_id":
        return

    @functools.wraps(original)
    def get_mm_hashes(self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        named = repository(model_id) if isinstance(model_id, str) else model_id
        return original(self, named, *args, **kwargs)

    setattr(get_mm_hashes, _OURS, True)
    ProcessorInputs.get_mm_hashes = get_mm_hashes


def commit_of(model_config: Any, load_config: Any) -> str:
    """The commit of the model that vLLM loads; empty where it cannot be determined.

    Call it before the model is loaded, and again afterwards: a vLLM that does not resolve the
    commit itself loads another one if the branch moved in between.
    """
    name = str(model_config.model)
    snapshot = snapshot_at(name)
    if snapshot:
        return snapshot.commit
    if Path(name).exists():
        return ""  # vLLM loads the folder of that name
    revision = getattr(model_config, "revision", None)
    settled = getattr(revision, "resolved", None)  # by vLLM 0.32 and newer
    known = settled or _commit_of_config(model_config, name)
    if known:
        return str(known)
    if revision and _COMMIT.match(revision):
        return str(revision)
    return _cached_commit(name, revision or "main", getattr(load_config, "download_dir", None))


def _commit_of_config(model_config: Any, name: str) -> str | None:
    """The commit that transformers before 5 writes into a configuration, if the configuration is
    the model's own."""
    if (getattr(model_config, "hf_config_path", None) or name) != name:
        return None
    return getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)


def _cached_commit(name: str, revision: str, download_dir: str | None) -> str:
    """The commit of a branch or tag, from the hub's cache; empty if that has no snapshot of it."""
    from vllm import envs

    if getattr(envs, "VLLM_USE_MODELSCOPE", False):
        return ""  # another hub; its repositories may have the same names
    folder = f"models--{name.replace('/', _SEPARATOR)}"
    try:
        root = Path(download_dir) if download_dir else _hub_cache()
        commit = (root / folder / "refs" / revision).read_text(encoding="ascii").strip()
        is_there = (root / folder / "snapshots" / commit).is_dir()
    except (OSError, ValueError):
        return ""
    return commit if is_there and _COMMIT.match(commit) else ""


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
