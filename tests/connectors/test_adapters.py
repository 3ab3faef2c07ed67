"""LoRA adapters by content: the same files are the same adapter, wherever and however named."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.identifiers import ADAPTERS_MAX, Adapters, content_digest
from nodes import wait_until
from patience import scaled

WEIGHTS = os.urandom(3 << 20)


def adapter(
    folder: Path, *, weights: bytes = WEIGHTS, config: str = '{"r": 8}', suffix: str = "safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"adapter_model.{suffix}").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    (folder / "README.md").write_text(f"# {folder}")
    return folder


def loaded(path: Path, name: str = "cats", number: int = 1, **more: Any) -> SimpleNamespace:
    """What vLLM calls a LoRARequest."""
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


def known(adapters: Adapters, request: SimpleNamespace) -> str:
    wait_until(lambda: adapters.digest_of(request), 5.0)
    return adapters.digest_of(request)


def test_equal_files_are_one_adapter_under_any_name(tmp_path: Path) -> None:
    here, there = Adapters(), Adapters()
    first = known(here, loaded(adapter(tmp_path / "a")))
    assert first == known(there, loaded(adapter(tmp_path / "b"), "dogs", 7))
    assert len(first) == 64


@pytest.mark.parametrize(
    "other",
    [
        {"weights": WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])},
        {"weights": WEIGHTS[: 1 << 20] + b"x" + WEIGHTS[(1 << 20) + 1 :]},
        {"config": '{"r": 16}'},
        {"suffix": "bin"},
    ],
    ids=["last byte", "a byte in the middle", "configuration", "file name"],
)
def test_any_difference_makes_another_adapter(tmp_path: Path, other: dict[str, Any]) -> None:
    one = content_digest(adapter(tmp_path / "one"))
    another = content_digest(adapter(tmp_path / "another", **other))
    assert one
    assert another
    assert one != another


def test_a_look_up_never_waits_for_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slowly(folder: Path) -> str:
        gate.wait(600.0)
        return content_digest(folder)

    monkeypatch.setattr("connectors.identifiers.content_digest", slowly)
    adapters, request = Adapters(), loaded(adapter(tmp_path / "a"))
    started = time.monotonic()
    assert [adapters.digest_of(request) for _ in range(100)] == [""] * 100
    assert time.monotonic() - started < scaled(0.5)
    gate.set()
    assert known(adapters, request) == content_digest(tmp_path / "a")


def test_a_path_without_weights_has_no_digest(tmp_path: Path) -> None:
    only_config = tmp_path / "config"
    only_config.mkdir()
    (only_config / "adapter_config.json").write_text("{}")
    unreadable = adapter(tmp_path / "gone")
    (unreadable / "adapter_model.safetensors").unlink()
    (unreadable / "adapter_model.safetensors").symlink_to(tmp_path / "nowhere")
    for path in (Path("someone/adapter-on-a-hub"), Path("\0"), only_config, unreadable):
        assert content_digest(path) == ""


def test_files_that_change_during_the_hash_have_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "a")
    real = Path.open

    def change(path: Path, *arguments: Any, **more: Any) -> Any:
        file = real(path, *arguments, **more)
        if path.suffix == ".json" and arguments == ("rb",):
            os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
        return file

    monkeypatch.setattr(Path, "open", change)
    assert content_digest(folder) == ""


def test_a_folder_is_hashed_once_and_later_changes_are_ignored(tmp_path: Path) -> None:
    """vLLM keeps the loaded weights; only a new number means that it loaded them again."""
    adapters, folder = Adapters(), adapter(tmp_path / "a")
    first = known(adapters, loaded(folder))
    adapter(folder, weights=b"trained on")
    assert known(adapters, loaded(folder)) == first
    second = known(adapters, loaded(folder, number=2))
    assert second == content_digest(folder) != first


def test_an_adapter_replaced_in_place_is_not_shared_again(tmp_path: Path) -> None:
    adapters, folder = Adapters(), adapter(tmp_path / "a")
    assert known(adapters, loaded(folder))
    assert adapters.digest_of(loaded(folder, load_inplace=True)) == ""
    assert adapters.digest_of(loaded(folder)) == ""


def test_a_name_of_several_adapters_is_known(tmp_path: Path) -> None:
    adapters, first, second = Adapters(), adapter(tmp_path / "a"), adapter(tmp_path / "b")
    for request in (loaded(first), loaded(first), loaded(second, name="dogs", number=2)):
        adapters.digest_of(request)
    adapters.digest_of(loaded(first, number=4))  # the same files again
    assert not adapters.is_reused("cats")
    adapters.digest_of(loaded(second, number=3))
    assert adapters.is_reused("cats")
    assert not adapters.is_reused("dogs")


def test_the_number_of_adapters_is_bounded(tmp_path: Path) -> None:
    adapters, folder = Adapters(), adapter(tmp_path / "a", weights=b"w")
    adapters._digests = {("n", number, "p", False): "" for number in range(ADAPTERS_MAX)}
    before = threading.active_count()
    assert adapters.digest_of(loaded(folder)) == ""
    assert threading.active_count() == before
