"""`lookup-buffer why` about a chunk that an engine with another KV cache stored."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from command_line import run
from connectors.kv.chunks import key_of
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import MissingTensor
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, wait_until
from test_engine_namespace import change
from test_kv_start import parts

OTHERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "blocks": ({"block": 64}, {"block_size"}),
    "dtype": (
        {"changed": change("cache_config.cache_dtype", "fp8_e4m3")},
        {"kv_cache_dtype"},
    ),
    "workers": (
        {"changed": change("parallel_config.tensor_parallel_size", 2)},
        {"tensor_parallel_size", "kv_heads"},
    ),
    "layers": ({"changed": change("model_config.get_num_layers", lambda _: 12)}, {"layers"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_why_names_the_difference_between_the_engines(
    what: str, node_pair: tuple[NodeProcess, NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")
    settings, named = OTHERS[what]
    here, there = node_pair
    one, other = Namespace(parts()), Namespace(parts(**settings))
    chunk = key_of(f"{what}-0123456789abcdef", rank=0)
    asked = ("why", chunk.text, "--namespace", other.fingerprint, "--store-url")

    def findings() -> Any:
        done = run(*asked, here.settings.store_url, "--json")
        return json.loads(done.stdout)["findings"]

    with LookupBuffer(here.config, one) as stored, LookupBuffer(there.config, other) as missing:
        stored.insert(chunk, torch.ones(3))
        with pytest.raises(MissingTensor):
            missing.select(chunk)
        wait_until(lambda: findings()[0]["differs"], 20.0)
        (finding,) = findings()
    assert {part.partition(".")[0] for part in finding["differs"]} == named
