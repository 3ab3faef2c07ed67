"""The namespace over vLLM's own configurations, as its command line's arguments make them.

No engine runs: most of these settings need an accelerator, or other weights. That engines of two
namespaces share nothing is what `test_sharing` shows, with other weights. Clients of
real nodes stand for the engines that ask why.
"""

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fork_server
from command_line import run, run_json
from connectors.plugin import CONNECTOR_NAME
from engines import START_SECONDS, engine_settings
from examples.demo.engine_settings import engine_arguments, engine_environment
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import MissingTensor
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, key, wait_until

pytestmark = pytest.mark.vllm

QUANTIZED = {"quantization": "fp8_per_tensor", "dtype": "bfloat16"}
TOWER_LORA = {"enable_lora": True, "enable_tower_connector_lora": True}
USUAL: dict[str, Any] = {"dtype": "bfloat16"}


def role(name: str) -> dict[str, Any]:
    return USUAL | {"ec_transfer_config": {"ec_connector": CONNECTOR_NAME, "ec_role": name}}


APART: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "dtype": (USUAL, {"dtype": "float32"}, {"dtype"}),
    "revision": (USUAL, {"revision": "v2"}, {"revision"}),
    "code revision": (USUAL, {"code_revision": "v2"}, {"code_revision"}),
    "quantisation": (USUAL, QUANTIZED, {"quantization"}),
    "what is quantised": (
        QUANTIZED | {"quantization_config": {"ignore": ["re:.*lm_head.*"]}},
        QUANTIZED | {"quantization_config": {"ignore": ["re:.*vision.*"]}},
        {"quantization"},
    ),
    "processor": (
        USUAL,
        {"mm_processor_kwargs": {"size": {"longest_edge": 112}}},
        {"processor"},
    ),
    "decoding of media": (
        USUAL,
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"processor"},
    ),
    "the encoder's attention in fp8": (USUAL, {"mm_encoder_attn_dtype": "fp8"}, {"processor"}),
    "another implementation": (USUAL, {"model_impl": "transformers"}, {"implementation"}),
    "pruning of video": (USUAL, {"video_pruning_rate": 0.5}, {"processor"}),
    "another encoder": (
        USUAL,
        {"hf_overrides": {"vision_config": {"num_hidden_layers": 1}}},
        {"hf_overrides", "encoder", "encoder_config"},
    ),
    "made-up weights": (USUAL, {"load_format": "dummy"}, {"load_format"}),
    "their seed": (
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 3},
        {"load_format"},
    ),
    "adapters in the encoder": (USUAL, TOWER_LORA, {"lora"}),
    "code of the model's own": (USUAL, {"trust_remote_code": True}, {"settings"}),
}
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal arguments": (USUAL, USUAL),
    "equal quantisation": (QUANTIZED, QUANTIZED),
    "another kernel for the encoder's attention": (
        USUAL,
        {"mm_encoder_attn_backend": "TORCH_SDPA"},
    ),
    "tensor parallelism": (USUAL, {"tensor_parallel_size": 2}),
    "a seed for sampling": (USUAL, {"seed": 3}),
    "adapters in the language model": (USUAL, {"enable_lora": True}),
    "longer prompts": (USUAL, {"max_model_len": 512}),
    "a name for clients": (USUAL, {"served_model_name": "a-name"}),
    "another tokenizer mode": (USUAL, {"tokenizer_mode": "hf"}),
    "CUDA graphs": (USUAL, {"enforce_eager": False}),
    "a larger processor cache": (USUAL, {"mm_processor_cache_gb": 1}),
    "another processor cache": (USUAL, {"mm_processor_cache_type": "shm"}),
    "another memory limit": (USUAL, {"gpu_memory_utilization": 0.3, "max_num_seqs": 2}),
    "more images in a prompt": (USUAL, {"limit_mm_per_prompt": {"image": 7}}),
    "media from files": (USUAL, {"allowed_local_media_path": "/tmp"}),
    "the encoder's data spread over the ranks": (USUAL, {"mm_encoder_tp_mode": "data"}),
    "sampling": (USUAL, {"logprobs_mode": "processed_logits", "max_logprobs": 3}),
    "embeddings from clients": (USUAL, {"enable_mm_embeds": True}),
    "an encode-only producer and its consumer": (role("ec_producer"), role("ec_consumer")),
    "an encode-only producer and one that does both": (role("ec_producer"), role("ec_both")),
    "a consumer without an encoder": (
        role("ec_producer"),
        role("ec_consumer") | {"limit_mm_per_prompt": {"image": 0}, "enable_mm_embeds": True},
    ),
    "a processor on the device of the encoder": (
        USUAL,
        {"mm_processor_kwargs": {"device": "cpu"}},
    ),
    "another reader of the checkpoint": (USUAL, {"load_format": "safetensors"}),
}

PARTS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from connectors.namespace import namespace_parts
from connectors.settings import ConnectorSettings
for arguments in json.loads(sys.argv[1]):
    config = EngineArgs(**arguments).create_engine_config()
    parts = namespace_parts(config, ConnectorSettings(capacity_bytes=1 << 24))
    print("PARTS", json.dumps(parts), flush=True)
"""


@pytest.fixture(scope="module")
def parts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By arguments, the parts of the namespace. Of two processes, as engines have."""
    usual = engine_settings("configured", model, tmp_path_factory.mktemp("configured"))
    work = tmp_path_factory.mktemp("programs")
    pairs = [(one, other) for one, other, _ in APART.values()] + list(TOGETHER.values())

    def of_one_process(position: int) -> list[tuple[str, dict[str, str]]]:
        cases = [pair[position] for pair in pairs]
        folder = work / str(position)
        folder.mkdir()
        _, output = fork_server.finished(
            PARTS,
            [json.dumps([engine_arguments(usual) | USUAL | case for case in cases])],
            folder=folder,
            environment=os.environ | engine_environment(usual),
            timeout_seconds=START_SECONDS,
        )
        lines = [x for x in output.splitlines() if x.startswith("PARTS ")]
        assert len(lines) == len(cases), output
        made = [json.loads(line.removeprefix("PARTS ")) for line in lines]
        return [(f"{position} {case}", parts) for case, parts in zip(cases, made, strict=True)]

    with ThreadPoolExecutor(max_workers=2) as processes:
        return dict(itertools.chain(*processes.map(of_one_process, (0, 1))))


def differing(
    parts: dict[str, dict[str, str]], one: dict[str, Any], other: dict[str, Any]
) -> set[str]:
    first, second = parts[f"0 {one}"], parts[f"1 {other}"]
    assert first.keys() == second.keys()
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize("name", APART)
def test_what_outputs_depend_on_keeps_engines_apart(
    parts: dict[str, dict[str, str]], name: str
) -> None:
    one, other, named = APART[name]
    assert differing(parts, one, other) == named


@pytest.mark.parametrize("name", TOGETHER)
def test_what_outputs_do_not_depend_on_does_not(
    parts: dict[str, dict[str, str]], name: str
) -> None:
    one, other = TOGETHER[name]
    assert differing(parts, one, other) == set()


@pytest.mark.parametrize("name", ["dtype", "quantisation", "processor", "another encoder"])
def test_why_names_what_keeps_engines_apart(
    parts: dict[str, dict[str, str]], node_pair: tuple[NodeProcess, NodeProcess], name: str
) -> None:
    """An item of the one engine, asked about from the other's point of view."""
    one, other, named = APART[name]
    first, second = Namespace(parts[f"0 {one}"]), Namespace(parts[f"1 {other}"])
    image, here, there = key(), *node_pair
    store_url = here.settings.store_url
    asked = ("why", image.text, "--namespace", second.fingerprint, "--store-url", store_url)
    with LookupBuffer(here.config, first) as buffer, LookupBuffer(there.config, second) as missing:
        buffer.insert(image, torch.ones(3))
        with pytest.raises(MissingTensor):
            missing.select(image)
        wait_until(lambda: _compared(asked), 20.0)
        (finding,) = run_json(*asked, code=1)["findings"]
    assert (finding["code"], finding["other_namespace"]) == ("other_namespace", first.fingerprint)
    assert {part.partition(".")[0] for part in finding["differs"]} == named
    for part in named:
        assert part in finding["sentence"]


def _compared(asked: tuple[str, ...]) -> bool:
    (finding, *_) = json.loads(run(*asked, "--json").stdout)["findings"]
    return bool(finding["differs"])
