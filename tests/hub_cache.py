"""A cache folder as huggingface_hub lays it out, made by hand: no hub is asked."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = "test-org/tiny-model"
UNREACHABLE = "http://127.0.0.1:9"
"""A hub that refuses connections: what is cached is used, under the model's id."""


def commit_of(text: str) -> str:
    """A commit's hash, made up."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def add_commit(cache: Path, model: Path, commit: str) -> Path:
    """A snapshot with the files of `model`: links to blobs. Returns its folder."""
    root = cache / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    blobs = root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        data = path.read_bytes()
        blob = blobs / hashlib.sha256(data).hexdigest()
        if not blob.exists():
            blob.write_bytes(data)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def point(cache: Path, revision: str, commit: str) -> None:
    """A branch or a tag stands for a commit from now on."""
    path = cache / f"models--{REPOSITORY.replace('/', '--')}" / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)


def environment(cache: Path, *, offline: bool) -> Mapping[str, str]:
    """For a process that uses this cache."""
    return {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_ENDPOINT": UNREACHABLE,
    }
