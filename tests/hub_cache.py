"""A hub and its cache, made by hand: the folders that huggingface_hub keeps what it downloaded in,
and a server that answers of them what vLLM asks a hub before it takes files from there."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = "test-org/tiny-model"
_FOLDER = f"models--{REPOSITORY.replace('/', '--')}"


def commit_named(text: str) -> str:
    """A commit's hash, made up."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def add_commit(cache: Path, model: Path, commit: str) -> Path:
    """A snapshot with the files of `model`: links to blobs. Returns its folder."""
    root = cache / _FOLDER
    snapshot, blobs = root / "snapshots" / commit, root / "blobs"
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
    (cache / _FOLDER / "refs" / revision).write_text(commit)


def environment(cache: Path, endpoint: str | None = None) -> Mapping[str, str]:
    """For a process that uses this cache: offline, or with the hub at `endpoint`."""
    variables = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0" if endpoint else "1"}
    return variables | ({"HF_ENDPOINT": endpoint} if endpoint else {})


@contextmanager
def hub_over(cache: Path) -> Iterator[str]:
    """A hub that has the snapshots of `cache`. Yields its endpoint."""
    handler = type("Handler", (_Hub,), {"root": cache / _FOLDER})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Hub(BaseHTTPRequestHandler):
    """What a revision stands for, which files a commit has, and what each is."""

    root: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").replace("%2F", "/")
        if path.startswith(f"api/models/{REPOSITORY}"):
            kind, _, rest = path.removeprefix(f"api/models/{REPOSITORY}").strip("/").partition("/")
            self._tell(kind, rest.strip("/"))
        elif path.startswith(f"{REPOSITORY}/resolve/"):
            revision, _, name = path.removeprefix(f"{REPOSITORY}/resolve/").partition("/")
            self._file(revision, name)
        else:
            self._send(404, b"{}")

    def _tell(self, kind: str, revision: str) -> None:
        commit = self._commit(revision or "main")
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted((self.root / "snapshots" / commit).iterdir())
        told: Any = {"id": REPOSITORY, "sha": commit}
        told["siblings"] = [{"rfilename": path.name} for path in files]
        if kind == "tree":
            told = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.resolve().name}
                for p in files
            ]
        self._send(200, json.dumps(told).encode())

    def _file(self, revision: str, name: str) -> None:
        commit = self._commit(revision)
        path = self.root / "snapshots" / (commit or "none") / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or ""})
            return
        named = {"X-Repo-Commit": commit or "", "ETag": f'"{path.resolve().name}"'}
        self._send(200, path.read_bytes(), named)

    def _commit(self, revision: str) -> str | None:
        if (self.root / "snapshots" / revision).is_dir():
            return revision
        ref = self.root / "refs" / revision
        return ref.read_text() if ref.is_file() else None

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""
