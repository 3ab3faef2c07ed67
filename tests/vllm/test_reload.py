"""A real engine whose weights are replaced while it runs, with an image that is stored already."""

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

import fork_server
from engines import OUTCOME_SECONDS, START_SECONDS, Album, connector, engine_settings, weights
from examples.demo.engine_settings import Placement, engine_arguments, engine_environment
from nodes import StartNode, wait_until

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
    log = tmp_path / "engine.log"
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rw") as connection, node.client("stats") as client:
        engine = fork_server.launch(
            "reloading_engine",
            ["{0}"],
            log=log,
            environment=os.environ | engine_environment(settings),
            keep=[theirs.fileno()],
        )
        theirs.close()
        try:
            ours.settimeout(START_SECONDS)
            print(json.dumps(given), file=connection, flush=True)
            assert connection.readline() == "STORED\n", log.read_text()
            wait_until(lambda: client.stats()["items"] == 2, OUTCOME_SECONDS)
            print(file=connection, flush=True)
            answers = connection.readline()
            assert engine.wait(START_SECONDS) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
        stats = client.stats()
    before, after, encoded = json.loads(answers.removeprefix("ANSWERS"))
    assert after == encoded != before
    assert stats["hits_local"] == 1, "before its weights changed, it loaded what was stored"
    assert (stats["inserts_stored"], stats.get("inserts_exists", 0)) == (2, 0)
    assert "weights of this engine have changed" in log.read_text()
