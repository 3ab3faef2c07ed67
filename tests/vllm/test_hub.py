"""Models named by a hub's id: the commit that is loaded, by vLLM's own configurations and hashes,
with a hub's cache made by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors import hub
from engines import START_SECONDS, engine_settings, weights
from examples.demo.engine_settings import engine_arguments, engine_environment
from models import REPOSITORY, add_commit, commit_named, environment, hub_over, point
from nodes import ROOT
from test_engine_namespace import vllm_config

FIRST, SECOND = commit_named("first"), commit_named("second")

ASKED = """
import json, sys
from PIL import Image
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from connectors.namespace import engine_identity
from connectors.settings import ConnectorSettings
for arguments in json.load(sys.stdin):
    config = EngineArgs(**arguments).create_engine_config()
    identity = engine_identity(config, ConnectorSettings(capacity_bytes=1 << 24))
    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    picture = Image.new("RGB", (224, 224), (10, 20, 30))
    items = processor.info.parse_mm_data({"image": [picture]})
    made = processor("<image>What?", mm_items=items)
    told = {
        "parts": identity.parts,
        "version": identity.weights.version,
        "unknown": identity.weights.unknown,
        "loaded": str(config.model_config.model),
        "hashes": made["mm_hashes"]["image"],
    }
    print("TOLD", json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for commit in (FIRST, SECOND):
        add_commit(folder, weights(seed=0), commit)
    point(folder, "main", FIRST)
    point(folder, "v2", SECOND)
    return folder


def told(work: Path, variables: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one process of vLLM makes of these arguments."""
    usual = engine_settings("hub", Path(REPOSITORY), work)
    finished = subprocess.run(
        [sys.executable, "-c", ASKED],
        input=json.dumps([engine_arguments(usual) | case for case in cases]),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        cwd=ROOT,
        env=os.environ | engine_environment(usual) | variables,
        check=False,
    )
    lines = [x for x in finished.stdout.splitlines() if x.startswith("TOLD ")]
    assert len(lines) == len(cases), finished.stderr
    return [json.loads(line.removeprefix("TOLD ")) for line in lines]


CASES: list[dict[str, Any]] = [{}, {"revision": "main"}, {"revision": FIRST}, {"revision": "v2"}]


@pytest.mark.vllm
def test_one_commit_is_one_identity_offline_and_online(cache: Path, tmp_path: Path) -> None:
    """However it was asked for; another commit is another one."""
    offline = told(tmp_path, environment(cache), CASES)
    with hub_over(cache) as endpoint:
        online = told(tmp_path, environment(cache, endpoint), CASES)
    assert {one["loaded"] for one in online} == {REPOSITORY}
    assert all(one["loaded"].startswith(str(cache)) for one in offline), "vLLM's own replacement"
    for each in (offline, online):
        *same, other = each
        assert all(one["parts"] == offline[0]["parts"] for one in same)
        assert {one["version"] for one in same} == {f"commit {FIRST}"}
        assert other["version"] == f"commit {SECOND}"
        assert other["parts"]["revision"] == SECOND
        assert {one["parts"]["model"] for one in each} == {REPOSITORY}
        assert not any(one["unknown"] for one in each)
    hashes = {one["hashes"][0] for one in offline + online}
    assert len(hashes) == 1, "an image has one name"


@pytest.mark.vllm
def test_a_cache_folder_of_its_own_and_a_hub_that_is_not_reached(
    cache: Path, tmp_path: Path
) -> None:
    """`--download-dir` is the weights' cache; a branch that moves later changes nothing."""
    made = vllm_config()
    made.model_config.model = REPOSITORY
    made.load_config.download_dir = str(cache)
    assert hub.commit_of(made.model_config, made.load_config) == FIRST
    made.model_config.revision = "v2"
    assert hub.commit_of(made.model_config, made.load_config) == SECOND
    made.model_config.revision = "v3"
    assert hub.commit_of(made.model_config, made.load_config) == "", "no such revision is cached"
    made.load_config.download_dir = str(tmp_path)
    assert hub.commit_of(made.model_config, made.load_config) == ""


@pytest.mark.vllm
def test_a_configuration_of_another_repository_says_no_commit_of_the_model(cache: Path) -> None:
    """With `--hf-config-path`; transformers before 5 writes a commit into what it reads."""
    made = vllm_config()
    made.model_config.model = REPOSITORY
    made.load_config.download_dir = str(cache)
    made.model_config.hf_config._commit_hash = SECOND
    made.model_config.hf_config_path = REPOSITORY
    assert hub.commit_of(made.model_config, made.load_config) == SECOND
    made.model_config.hf_config_path = "org/configuration"
    assert hub.commit_of(made.model_config, made.load_config) == FIRST


def test_a_repository_that_another_hub_has(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_config()
    made.model_config.model = REPOSITORY
    made.load_config.download_dir = str(cache)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert hub.commit_of(made.model_config, made.load_config) == ""


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (f"/cache/models--org--name/snapshots/{FIRST}", "org/name"),
        (f"/cache/models--org--name/snapshots/{FIRST}/", "org/name"),
        (f"models--gpt2/snapshots/{FIRST}", "gpt2"),
        (f"/cache/models--org--name/snapshots/{FIRST}/below", None),
        (f"/cache/models--org--name/snapshots/{FIRST[:39]}", None),
        (f"/cache/datasets--org--name/snapshots/{FIRST}", None),
        ("/cache/models--org--name/refs/main", None),
        ("org/name", None),
        ("", None),
    ],
)
def test_only_the_path_of_a_snapshot_is_taken_for_one(path: str, named: str | None) -> None:
    assert hub.repository(path) == (named or path)
    assert (hub.snapshot_at(path) is not None) is (named is not None)
