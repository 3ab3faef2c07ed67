"""A real engine whose weights are replaced while it runs, with an image that is stored already."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import OUTCOME_SECONDS, START_SECONDS, Album, connector, engine_settings, weights
from examples.demo.engine_settings import Placement, engine_arguments, engine_environment
from nodes import ROOT, StartNode, wait_until

pytestmark = pytest.mark.vllm


def test_an_engine_with_other_weights_loads_nothing_of_before_and_stores_nothing(
    start_node: StartNode, album: Album, tmp_path: Path
) -> None:
    node = start_node()
    settings = engine_settings(
        "reloading",
        weights(seed=0),
        tmp_path,
        placement=Placement.TWO_PROCESSES,
        ec_transfer_config=connector(node),
    )
    given = {
        "arguments": engine_arguments(settings),
        "pictures": [str(path) for path in album.paths[:2]],
        "other_weights": str(weights(seed=1)),
    }
    with (
        (tmp_path / "engine.log").open("w+") as log,
        subprocess.Popen(
            [sys.executable, ROOT / "tests" / "support" / "reloading_engine.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=os.environ | engine_environment(settings) | {"PYTHONPATH": str(ROOT)},
        ) as engine,
        node.client("stats") as client,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            engine.stdin.write(json.dumps(given) + "\n")
            engine.stdin.flush()
            lines = iter(engine.stdout)
            assert any(line.startswith("STORED") for line in lines), log.name
            wait_until(lambda: client.stats()["items"] == 2, OUTCOME_SECONDS)
            engine.stdin.write("\n")
            engine.stdin.flush()
            said = list(lines)
            assert engine.wait(START_SECONDS) == 0
        finally:
            engine.kill()
        stats = client.stats()
    (told,) = [line for line in said if line.startswith("ANSWERS")]
    before, after, encoded = json.loads(told.removeprefix("ANSWERS"))
    assert after == encoded != before
    assert stats["hits_local"] == 1, "before its weights changed, it loaded what was stored"
    assert (stats["inserts_stored"], stats.get("inserts_exists", 0)) == (2, 0)
    assert any("weights of this engine have changed" in line for line in said)
