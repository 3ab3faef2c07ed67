"""Statistics of saved encodes, and how long those that ran took."""

import time

import pytest
import torch

from command_line import run, run_json
from lookup_buffer.client.buffer import EngineRank
from nodes import NodeProcess, key, wait_until, with_store

Pair = tuple[NodeProcess, NodeProcess]
ENCODE_SECONDS = 0.3


def printed_by(url: str) -> tuple[int | None, int | None]:
    totals = run_json("stats", "--store-url", url)["totals"]
    return totals.get("encodes"), totals.get("encodes_saved")


def test_each_engine_with_a_saved_encode_counts(node_pair: Pair) -> None:
    first, second = node_pair
    with_store(first, second)
    claimed, told = key(), key()
    with first.client(engine=EngineRank("encodes", None, 1, encodes=True)) as encoder:
        assert encoder.claim(claimed, lease_seconds=20.0).granted
        encoder.encoding([told], lease_seconds=20.0)
        time.sleep(ENCODE_SECONDS)  # what an encode is, as far as a node can see it
        for name in (claimed, told, claimed):  # the last one is there already: nothing was encoded
            encoder.insert(name, torch.ones(3))
        encoder.insert(key(), torch.ones(3))  # without a report that it is being encoded
    with second.client(engine=EngineRank("loads", 0, 1, encodes=True)) as engine:
        wait_until(lambda: all(engine.has_caches([claimed, told])), 5.0)
        for name in (claimed, claimed, told):
            engine.select(name)
    with second.client(engine=EngineRank("other things", 0, 1)) as other, second.client() as one:
        other.select(claimed)
        one.select(claimed)
    wait_until(lambda: second.stats().get("encodes_saved") == 3, 5.0)
    encoded, loaded = first.stats(), second.stats()
    assert (encoded["encodes"], "encodes" in loaded) == (2, False)
    assert ENCODE_SECONDS * 1e3 < encoded["encode_milliseconds"] < 2 * 5e3
    assert "encodes_saved" not in encoded
    url = first.config.store_url
    assert url is not None
    wait_until(lambda: printed_by(url) == (2, 3), 10.0, "both nodes have said what they counted")
    mean_seconds = encoded["encode_milliseconds"] / 2e3
    document = run_json("stats", "--store-url", url)
    assert document["seconds_saved"] == pytest.approx(3 * mean_seconds, abs=0.001)
    assert (
        f"encodes saved: 3, about {3 * mean_seconds:.1f} s at"
        in run("stats", "--store-url", url).stdout
    )
