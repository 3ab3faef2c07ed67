"""Fetching a release's sources: parts of a wheel where the server has ranges, no wrong byte.

The wheel is a small one with the shape of vLLM's; index and files come from a server on 127.0.0.1.
"""

import base64
import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from patience import scaled
from scripts import fetch_host
from scripts.fetch_host import FetchError, Wheel, fetch

ROOT = Path(__file__).resolve().parents[2]
NAME = "vllm-9.9.9-py3-none-any.whl"
INFO = "vllm-9.9.9.dist-info"
COMPILED_BYTES = 4 << 20


def digest(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + raw.rstrip(b"=").decode()


def make_wheel(**lies: bytes) -> bytes:
    """`lies` replace what is in the archive after RECORD was written."""
    files = {
        "vllm/__init__.py": b"__version__ = '9.9.9'\n",
        "vllm/_C.abi3.so": os.urandom(COMPILED_BYTES),
        "vllm/v1/request.py": b"class Request: ...\n",
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{INFO}/RECORD"] = (record + f"{INFO}/RECORD,,\n").encode()
    if "request" in lies:
        files["vllm/v1/request.py"] = lies["request"]
    if "record" in lies:
        files[f"{INFO}/RECORD"] = lies["record"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


class FileServer(ThreadingHTTPServer):
    """Serves one wheel and a simple index of it; counts the bytes that it sends of the wheel."""

    daemon_threads = True

    def __init__(self, wheel: bytes, *, knows_ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.knows_ranges = knows_ranges
        self.sent_bytes = 0
        self.cut_short = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        if self.path.startswith("/simple/vllm"):
            sha = hashlib.sha256(self.server.wheel).hexdigest()
            page = f'<a href="/files/{NAME}#sha256={sha}">{NAME}</a>'.encode()
            self._send(200, page, {"Content-Type": "text/html"})
        elif self.path != f"/files/{NAME}":
            self._send(404, b"", {})
        elif self.server.knows_ranges and "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            total = len(self.server.wheel)
            part = self.server.wheel[first : last + 1]
            if self.server.cut_short:
                part = part[: len(part) // 2]
            self._send(206, part, {"Content-Range": f"bytes {first}-{last}/{total}"})
            self.server.sent_bytes += len(part)
        else:
            self._send(200, self.server.wheel, {})
            self.server.sent_bytes += len(self.server.wheel)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(wheel: bytes, *, knows_ranges: bool = True) -> Iterator[FileServer]:
    server = FileServer(wheel, knows_ranges=knows_ranges)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=5)
        server.server_close()


def point_to(server: FileServer, monkeypatch: pytest.MonkeyPatch, sha256: str = "") -> None:
    wheel = Wheel(f"{server.url}/files/{NAME}", sha256)
    monkeypatch.setattr(fetch_host, "locate", lambda _: wheel)


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_brings_the_python_files_and_nothing_else(
    knows_ranges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_host, "READ_AHEAD_BYTES", 4096)
    with serving(make_wheel(), knows_ranges=knows_ranges) as server:
        point_to(server, monkeypatch)
        folder = fetch("9.9.9", tmp_path)
        assert (server.sent_bytes < COMPILED_BYTES / 100) is knows_ranges
        sent = server.sent_bytes
        assert fetch("9.9.9", tmp_path) == folder
        assert server.sent_bytes == sent, "a second run sends no request"
    assert (folder / "vllm/v1/request.py").read_bytes() == b"class Request: ...\n"
    assert not list(folder.rglob("*.so"))
    assert [path.name for path in tmp_path.iterdir()] == ["9.9.9"]


@pytest.mark.parametrize("knows_ranges", [True, False])
@pytest.mark.parametrize(
    ("lies", "complaint"),
    [
        ({"request": b"class Requesx: ...\n"}, "differs from the wheel's RECORD"),
        ({"record": b"vllm/__init__.py,,\n"}, "differs from the wheel's RECORD"),
    ],
)
def test_another_content_than_recorded_is_refused_and_nothing_is_left(
    knows_ranges: bool,
    lies: dict[str, bytes],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(make_wheel(**lies), knows_ranges=knows_ranges) as server:
        point_to(server, monkeypatch)
        with pytest.raises(FetchError, match=complaint):
            fetch("9.9.9", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_whole_wheel_of_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_wheel(), knows_ranges=False) as server:
        point_to(server, monkeypatch, sha256="0" * 64)
        with pytest.raises(FetchError, match="does not have the hash that the index gives"):
            fetch("9.9.9", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["cut short", "no wheel", "refused", "not found"])
def test_a_fault_of_the_server_is_reported_and_nothing_is_left(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(b"no zip" * 100 if fault == "no wheel" else make_wheel()) as server:
        server.cut_short = fault == "cut short"
        point_to(server, monkeypatch)
        if fault == "not found":
            monkeypatch.setattr(fetch_host, "locate", lambda _: Wheel(f"{server.url}/x", ""))
        elif fault == "refused":
            monkeypatch.setattr(fetch_host, "locate", lambda _: Wheel("http://127.0.0.1:9/x", ""))
        with pytest.raises(FetchError):
            fetch("9.9.9", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_stops_sending_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_host, "SILENCE_SECONDS", 0.2)
    released = threading.Event()
    with serving(make_wheel()) as server:
        point_to(server, monkeypatch)
        monkeypatch.setattr(Handler, "do_GET", lambda _: released.wait(10))
        try:
            with pytest.raises(FetchError, match="timed out"):
                fetch("9.9.9", tmp_path)
        finally:
            released.set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_the_address_of_the_wheel_is_read_from_pip(tmp_path: Path) -> None:
    """The command itself, with pip's configuration naming the index."""
    with serving(make_wheel()) as server:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{server.url}/simple",
            "PIP_NO_CACHE_DIR": "1",
        }
        for version, status in (("9.9.9", 0), ("1.2.3", 1)):
            run = subprocess.run(
                [sys.executable, "scripts/fetch_host.py", version, "--into", str(tmp_path)],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(100),
                check=False,
            )  # fmt: skip
            assert run.returncode == status, run.stderr
            if status == 0:
                assert (Path(run.stdout.strip()) / "vllm/__init__.py").exists()
            else:
                assert "pip finds no wheel of vllm 1.2.3" in run.stderr
