"""Which weights an engine runs: by every byte of their files, a commit, or a name that is given."""

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.namespace import Identity, NamespaceTask
from connectors.weights import DigestCache, WeightsSource, weights_source
from lookup_buffer.errors import MissReason
from nodes import wait_until
from scheduler_drive import when_settled
from test_engine_namespace import vllm_config

BYTES = 1 << 20


@pytest.fixture(autouse=True)
def large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """These count as too large to be hashed at once."""
    monkeypatch.setattr("connectors.namespace.AT_ONCE_BYTES", 0)


def checkpoint(folder: Path, *, changed: int | None = None) -> Path:
    """Two files of weights; in one of them the byte at `changed` is another."""
    (folder / "below").mkdir(parents=True)
    for name in ("model.safetensors", "below/extra.bin"):
        data = bytearray(bytes(range(256)) * (BYTES // 256))
        if changed is not None and name == "model.safetensors":
            data[changed] ^= 1
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text(folder.name)
    return folder


def config(model: Path | str, **model_values: Any) -> Any:
    made = vllm_config()
    made.model_config.model = str(model)
    vars(made.model_config).update(model_values)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache")


class Namings:
    """Engines that start: each is closed at the end."""

    def __init__(self, cache: DigestCache) -> None:
        self.cache = cache
        self.made: list[NamespaceTask] = []

    def start(self, source: WeightsSource, **kwargs: Any) -> NamespaceTask:
        self.made.append(NamespaceTask(Identity({}, source), cache=self.cache, **kwargs))
        return self.made[-1]

    def weights(self, folder: Path) -> str:
        namespace = when_settled(self.start(weights_source(config(folder), "")))
        assert namespace is not None
        return namespace.parts["weights"]


@pytest.fixture
def engines(cache: DigestCache) -> Iterator[Namings]:
    namings = Namings(cache)
    yield namings
    for naming in namings.made:
        naming.close()


def test_equal_copies_in_two_folders_are_the_same(engines: Namings, tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name) for name in ("one", "other"))
    assert engines.weights(one) == engines.weights(other) != ""


@pytest.mark.parametrize("position", [0, 5000, BYTES // 2 + 12345, BYTES - 1])
def test_any_byte_counts(engines: Namings, tmp_path: Path, position: int) -> None:
    one = checkpoint(tmp_path / "one")
    other = checkpoint(tmp_path / "other", changed=position)
    assert engines.weights(one) != engines.weights(other)


def test_a_file_below_the_folder_counts(engines: Namings, tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name) for name in ("one", "other"))
    (other / "below/extra.bin").write_bytes(bytes(BYTES))
    assert engines.weights(one) != engines.weights(other)


def test_names_of_files_count(engines: Namings, tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name) for name in ("one", "other"))
    (other / "model.safetensors").rename(other / "adapter.safetensors")
    assert engines.weights(one) != engines.weights(other)


def test_a_model_that_is_one_file(engines: Namings, tmp_path: Path) -> None:
    seen = set()
    for content in (b"w", b"v"):
        path = tmp_path / content.decode() / "model.gguf"
        path.parent.mkdir()
        path.write_bytes(content)
        seen.add(engines.weights(path))
    assert len(seen) == 2


def test_weights_beside_the_model_count(tmp_path: Path) -> None:
    """Which of the two folders is read depends on the loader."""
    model = checkpoint(tmp_path / "model")
    beside = checkpoint(tmp_path / "beside")
    source = weights_source(config(model, model_weights=str(beside)), "")
    assert len(source.files) == 4


def test_the_weights_of_towers_elsewhere_count(engines: Namings, tmp_path: Path) -> None:
    """As Ultravox has them: only their names counted, in the model's configuration."""
    model, tower = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "tower")
    made = config(model)
    found = []
    for content in (b"one", b"two"):
        (tower / "model.safetensors").write_bytes(content)
        made.model_config.hf_config.text_model_id = str(tower)
        found.append(when_settled(engines.start(weights_source(made, ""))))
    assert found[0] is not None
    assert found[0] != found[1]
    made.model_config.hf_config.text_model_id = "org/of-a-hub"
    assert "another repository" in weights_source(made, "").unknown
    assert weights_source(made, "v1").version == "v1"


def test_given_a_version_no_file_is_read(tmp_path: Path) -> None:
    source = weights_source(config(checkpoint(tmp_path / "model")), "v7")
    assert (source.version, source.files, source.unknown) == ("v7", (), "")


@pytest.mark.parametrize("model", ["org/model", "s3://bucket/model", "empty"])
def test_weights_without_an_identity_are_not_shared(
    engines: Namings, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    named = str(tmp_path / "empty") if model == "empty" else model
    naming = engines.start(weights_source(config(named), ""))
    assert when_settled(naming) is None
    assert naming.reason == MissReason.NAMESPACE_UNKNOWN
    (line,) = [record.getMessage() for record in caplog.records]
    assert "shares nothing" in line
    assert "weights_version" in line


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache"])
def test_weights_that_do_not_come_from_the_models_folder(tmp_path: Path, load_format: str) -> None:
    made = config(checkpoint(tmp_path / "model"))
    made.load_config.load_format = load_format
    assert weights_source(made, "").unknown
    assert weights_source(made, "v1").version == "v1"


def test_weights_that_are_made_up_need_no_file(engines: Namings) -> None:
    made = config("org/model")
    made.load_config.load_format = "dummy"
    assert engines.start(weights_source(made, "")).namespace is not None


# -- hashing in the background


def test_nothing_waits_for_the_hash(engines: Namings, cache: DigestCache, tmp_path: Path) -> None:
    """Another engine of this host reads the same files: this one waits for it, in the background,
    and its end ends the wait."""
    source = weights_source(config(checkpoint(tmp_path / "model")), "")
    with cache.lock(threading.Event()):
        first, second = engines.start(source), engines.start(source)
        assert first.namespace is None
        assert first.reason == MissReason.NAMESPACE_PENDING
        second.close()
        assert second.namespace is None
    assert when_settled(first) is not None


SETTLED_NS = 100_000_000


@pytest.fixture(autouse=True)
def files_settle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product waits for file systems whose times are coarse; those of these tests are not."""
    monkeypatch.setattr("connectors.weights.SETTLED_NS", SETTLED_NS)


def settled(folder: Path) -> Path:
    """Once the file system's times are old enough to show a later write."""
    newest = max(path.stat().st_ctime_ns for path in folder.rglob("*"))

    def is_old() -> bool:
        probe = folder.parent / "probe"
        probe.write_bytes(b"")
        os.utime(probe)
        return probe.stat().st_ctime_ns - newest > SETTLED_NS

    wait_until(is_old, 30.0)
    return folder


def test_small_weights_are_hashed_before_the_engine_starts(
    engines: Namings, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another engine reads meanwhile."""
    monkeypatch.setattr("connectors.namespace.AT_ONCE_BYTES", 4 * BYTES)
    source = weights_source(config(checkpoint(tmp_path / "model")), "")
    with cache.lock(threading.Event()):
        assert engines.start(source).namespace is not None


def test_a_second_start_reads_no_file(engines: Namings, tmp_path: Path) -> None:
    folder = settled(checkpoint(tmp_path / "model"))
    source = weights_source(config(folder), "")
    first = engines.start(source)
    namespace = when_settled(first)
    assert namespace is not None
    assert engines.start(source).namespace == namespace, "known at once"


def test_a_file_that_was_written_since_is_read_again(engines: Namings, tmp_path: Path) -> None:
    """Also by one that keeps size and time of change, as `cp --preserve` and rsync do."""
    folder = settled(checkpoint(tmp_path / "model"))
    before = engines.weights(folder)
    path = folder / "model.safetensors"
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(4321)
        file.write(b"\xff")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert engines.weights(folder) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"1:2:3:4:5": 7}', b"\xff\xfe"])
def test_a_broken_cache_is_an_empty_one(engines: Namings, tmp_path: Path, content: bytes) -> None:
    folder = settled(checkpoint(tmp_path / "model"))
    digest = engines.weights(folder)
    (tmp_path / "cache/weights.json").write_bytes(content)
    assert engines.weights(folder) == digest
    assert (tmp_path / "cache/weights.json").stat().st_mode & 0o777 == 0o600


def test_without_a_cache_all_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory can be made below it")
    engines = Namings(DigestCache(tmp_path / "file" / "cache"))
    one, other = (checkpoint(tmp_path / name) for name in ("one", "other"))
    assert engines.weights(one) == engines.weights(other)


def test_a_lock_that_its_holder_keeps_is_given_up(
    engines: Namings, cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.weights.LOCK_SECONDS", 0.3)
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache/weights.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert engines.weights(checkpoint(tmp_path / "model"))


def test_a_file_system_without_locks(
    engines: Namings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing begins at once all the same, and not when the wait for a lock is over."""

    def refused(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("connectors.weights.fcntl.flock", refused)
    assert engines.weights(checkpoint(tmp_path / "model"))


@pytest.mark.parametrize("change", ["written", "replaced", "removed", "folder replaced"])
def test_files_that_change_after_the_worker_looked(
    engines: Namings, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of the two the engine loaded is not known, so it shares nothing."""
    link = tmp_path / "link"
    folder = checkpoint(tmp_path / "model")
    link.symlink_to(folder)
    source = weights_source(config(link), "")
    path = folder / "model.safetensors"
    if change == "written":
        path.write_bytes(path.read_bytes())
    elif change == "replaced":
        shutil.copy(path, tmp_path / "new")
        (tmp_path / "new").replace(path)
    elif change == "removed":
        path.unlink()
    else:
        link.unlink()
        link.symlink_to(checkpoint(tmp_path / "another"))
    naming = engines.start(source)
    assert when_settled(naming) is None
    assert naming.reason == MissReason.NAMESPACE_UNKNOWN
    assert "shares nothing" in caplog.text


def test_files_that_worker_and_scheduler_see_differently(
    engines: Namings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In two processes: the scheduler's reads the files after the worker's has loaded the model."""
    folder = checkpoint(tmp_path / "model")
    before = weights_source(config(folder), "")
    assert when_settled(engines.start(before, mark=before.mark)) is not None
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    after = weights_source(config(folder), "")
    assert when_settled(engines.start(after, mark=before.mark)) is None
    assert "changed while the engine started" in caplog.text
