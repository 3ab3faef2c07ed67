"""The demo's model: what is written to disk, and that equal settings give equal bytes."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer

from examples.demo.model import IMAGE_TOKEN, VOCABULARY, ensure_model, model_config
from examples.demo.model_size import HEAVY, TINY, ModelSize
from examples.demo.weights import make_tensor, plan_weights

PHOTOGRAPHS = Path(__file__).parents[2] / "examples" / "demo" / "photographs"


def _digest_of(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def test_equal_settings_write_equal_files_and_another_seed_other_weights(tmp_path: Path) -> None:
    first = ensure_model(TINY, tmp_path / "first")
    second = ensure_model(TINY, tmp_path / "second")
    other = ensure_model(TINY, tmp_path / "second", seed=1)
    assert _digest_of(first) == _digest_of(second)
    assert other != second
    assert (other / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_an_existing_model_is_not_changed_and_no_other_file_remains(tmp_path: Path) -> None:
    written = ensure_model(TINY, tmp_path)
    before = (written / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(TINY, tmp_path) == written
    assert (written / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [written.name]


def test_a_failure_leaves_no_partial_model(tmp_path: Path) -> None:
    def fail(made: int, total: int) -> None:
        raise InterruptedError(f"{made} of {total}")

    with pytest.raises(InterruptedError):
        ensure_model(TINY, tmp_path, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_all_values(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    ensure_model(TINY, tmp_path, progress=lambda made, total: told.append((made, total)))
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


def test_the_checkpoint_has_the_planned_tensors(tmp_path: Path) -> None:
    path = ensure_model(TINY, tmp_path) / "model.safetensors"
    plans = {plan.name: plan for plan in plan_weights(TINY, VOCABULARY)}
    with safe_open(path, framework="pt") as checkpoint:
        assert set(checkpoint.keys()) == set(plans)
        for name, plan in plans.items():
            assert tuple(checkpoint.get_slice(name).get_shape()) == plan.shape


def test_the_values_are_far_from_zero_and_from_each_other() -> None:
    for plan in plan_weights(TINY, VOCABULARY):
        values = make_tensor(plan, seed=0).float()
        assert torch.isfinite(values).all()
        assert values.std() > 0.5 * plan.std > 0.01
    queries, keys = (
        make_tensor(plan, seed=0)
        for plan in plan_weights(TINY, VOCABULARY)
        if plan.name.endswith(
            ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
        )
        and "vision" in plan.name
    )
    assert not torch.equal(queries, keys)


@pytest.mark.parametrize("size", [TINY, HEAVY], ids=lambda size: size.name)
def test_one_row_for_each_patch(size: ModelSize) -> None:
    config = model_config(size)
    vision = config["vision_config"]
    assert config["scale_factor"] == 1
    assert size.embeddings_per_image == (vision["image_size"] // vision["patch_size"]) ** 2
    assert vision["image_size"] % vision["patch_size"] == 0


def test_an_image_of_the_heavy_model_is_of_a_real_size() -> None:
    parameters = sum(
        plan.numel for plan in plan_weights(HEAVY, VOCABULARY) if "vision" in plan.name
    )
    assert HEAVY.nbytes_per_image >= 4 << 20
    assert 400e6 < parameters < 430e6  # SigLIP-so400m


def test_the_name_of_the_directory_depends_on_all_that_makes_the_weights() -> None:
    wider = replace(TINY, text=replace(TINY.text, hidden=512))
    assert len({TINY.digest(0), TINY.digest(1), wider.digest(0), HEAVY.digest(0)}) == 4


def test_the_tokenizer_knows_the_image_token_and_every_byte(tmp_path: Path) -> None:
    directory = ensure_model(TINY, tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
    assert tokenizer.token_to_id(IMAGE_TOKEN) == config["image_token_id"]
    text = "What is in this picture? Ünï→"
    encoded = tokenizer.encode(IMAGE_TOKEN + text)
    assert encoded.ids.count(config["image_token_id"]) == 1
    assert len(encoded.ids) == 1 + len(text.encode())
    assert tokenizer.decode(encoded.ids) == text


def test_the_photographs_are_small_and_have_a_source() -> None:
    paths = sorted(PHOTOGRAPHS.glob("*.jpg"))
    readme = (PHOTOGRAPHS / "README.md").read_text()
    assert len(paths) == 3
    for path in paths:
        assert path.stat().st_size < 300_000
        assert f"`{path.name}`" in readme
        with Image.open(path) as image:
            image.verify()
            assert max(image.size) <= 1024
