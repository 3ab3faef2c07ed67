"""Fetch the Python sources of one vLLM release, for `make test-hosts`.

    python scripts/fetch_host.py VERSION [--into build/hosts]      prints the folder

A wheel of vLLM has 250 to 500 MB, its Python files compressed 3 to 11. So only these are read, by
HTTP ranges. A server without ranges sends the whole wheel, which is then checked by its hash. Each
file is checked against the wheel's RECORD. pip locates the wheel, so pip's configuration selects
the index. An existing folder is complete and never fetched again.
"""

import argparse
import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

INTO = Path(__file__).resolve().parent.parent / "build" / "hosts"
SILENCE_SECONDS = 60.0
"""Timeout for a server that sends nothing."""
PIP_SECONDS = 300.0
READ_AHEAD_BYTES = 1 << 20
TOTAL_BYTES_MAX = 1 << 30


class FetchError(Exception):
    """The sources were not fetched, and no files were left. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Wheel:
    url: str
    sha256: str
    """Of the whole file; "" if the index has none."""

    @property
    def name(self) -> str:
        return self.url.partition("#")[0].rpartition("/")[2]


class RemoteFile(io.RawIOBase):
    """A file on a server that supports ranges; each read is one request."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        with _request(self._url, f"bytes={self._position}-{self._position + wanted - 1}") as answer:
            data = answer.read(wanted)
        if answer.status != 206 or len(data) != wanted:
            raise FetchError(f"the server sent {len(data)} bytes instead of a range of {wanted}")
        buffer[:wanted] = data
        self._position += wanted
        return wanted


def fetch(version: str, into: Path) -> Path:
    """The folder with the release's sources.

    Raises:
        FetchError: they could not be fetched, or differ from the wheel's RECORD.
    """
    folder = into / version
    if folder.is_dir():
        return folder
    into.mkdir(parents=True, exist_ok=True)
    wheel = locate(version)
    with tempfile.TemporaryDirectory(dir=into, prefix=".") as name:
        scratch = Path(name)
        try:
            with _opened(wheel, scratch) as archive:
                _extract(archive, scratch / "sources")
        except (OSError, HTTPException, zipfile.BadZipFile, KeyError) as error:
            raise FetchError(f"{wheel.name} could not be read: {error}") from error
        try:
            (scratch / "sources").rename(folder)
        except OSError:
            if not folder.is_dir():  # unless another run was faster
                raise
    return folder


def locate(version: str) -> Wheel:
    """The wheel that pip would download.

    Raises:
        FetchError: pip does not find it; the message has pip's output.
    """
    command = [
        _python_with_pip(), "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed",
        "--only-binary", ":all:", "--quiet", "--report", "-", f"vllm=={version}",
    ]  # fmt: skip
    _log(f"vllm {version}: locating its wheel with pip")
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not find vllm {version} in {PIP_SECONDS:.0f} s") from error
    if run.returncode != 0:
        raise FetchError(f"pip finds no wheel of vllm {version}:\n{run.stderr.strip()}")
    (found,) = json.loads(run.stdout)["install"]
    where = found["download_info"]
    hashes = where.get("archive_info", {}).get("hashes", {})
    return Wheel(where["url"], hashes.get("sha256", ""))


def _python_with_pip() -> str:
    """A Python with pip: this environment's, or else the base interpreter's."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    for python in (sys.executable, base):
        known = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if known.returncode == 0:
            return python
    raise FetchError(f"neither {sys.executable} nor {base} has pip")


@contextmanager
def _opened(wheel: Wheel, scratch: Path) -> Iterator[zipfile.ZipFile]:
    with _request(wheel.url, "bytes=0-0") as answer:
        if answer.status == 206:
            size = int(answer.headers["Content-Range"].rpartition("/")[2])
            _log(f"{wheel.name}: only its Python files, out of {size >> 20} MiB")
            remote = io.BufferedReader(RemoteFile(wheel.url, size), READ_AHEAD_BYTES)
        else:
            _log(f"{wheel.name}: the server has no range support; fetching the whole wheel")
            remote = None
            _download(answer, wheel, scratch / "wheel")
    with zipfile.ZipFile(remote or scratch / "wheel") as archive:
        yield archive


def _download(answer: IO[bytes], wheel: Wheel, path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        while data := answer.read(READ_AHEAD_BYTES):
            digest.update(data)
            file.write(data)
            if file.tell() > TOTAL_BYTES_MAX:
                raise FetchError(f"{wheel.name} has more than {TOTAL_BYTES_MAX} bytes")
    if wheel.sha256 and digest.hexdigest() != wheel.sha256:
        raise FetchError(f"{wheel.name} does not have the hash that the index gives")


def _extract(archive: zipfile.ZipFile, target: Path) -> None:
    """The Python files and the metadata, each as RECORD describes it."""
    names = archive.namelist()
    records = [name for name in names if name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise FetchError(f"a wheel has one RECORD, this one has {len(records)}")
    rows = csv.reader(archive.read(records[0]).decode().splitlines())
    promised = {name: digest for name, digest, _ in rows}
    members = [
        member
        for member in archive.infolist()
        if member.filename.endswith(".py") or ".dist-info/" in member.filename
    ]
    if sum(member.file_size for member in members) > TOTAL_BYTES_MAX:
        raise FetchError(f"its Python files have more than {TOTAL_BYTES_MAX} bytes")
    # In the order of their offsets, so that one range serves many.
    for member in sorted(members, key=lambda member: member.header_offset):
        data = archive.read(member)
        if member.filename != records[0] and promised.get(member.filename) != _digest(data):
            raise FetchError(f"{member.filename} differs from the wheel's RECORD")
        path = target / member.filename
        if target not in path.resolve().parents:
            raise FetchError(f"{member.filename} points out of the folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    _log(f"{len(members)} files")


def _digest(data: bytes) -> str:
    """The digest in the form of RECORD."""
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + raw.rstrip(b"=").decode()


@contextmanager
def _request(url: str, byte_range: str) -> Iterator[Any]:
    request = urllib.request.Request(url, headers={"Range": byte_range})
    with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as answer:
        yield answer


def _log(text: str) -> None:
    print(f"[hosts] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's Python sources of one release")
    parser.add_argument("version")
    parser.add_argument("--into", type=Path, default=INTO)
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.version, arguments.into))
    except FetchError as error:
        _log(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
