"""What is taken for an output of the encoder, by what vLLM's configuration says of the model."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import EMBED_BYTES, LedgerBuffer, Stored, make_request, step_output

pytest.importorskip("vllm")

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from connectors.ec.connector import LookupBufferECConnector
from connectors.ec.metadata import StepMetadata, WorkerCounts
from test_ec_connector import buffer, vllm_config

__all__ = ["buffer"]
WIDTH = EMBED_BYTES // 4


def plain(_: Any) -> None:
    """A decoder with one encoder, on an engine where vLLM measured nothing."""


def deepstack(config: Any) -> None:
    said = {"vision_config": {"deepstack_visual_indexes": [8, 16, 24]}, "layers": [{}, 1]}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: said)


def no_deepstack(config: Any) -> None:
    said: dict[str, Any] = {"vision_config": {"deepstack_visual_indexes": []}}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: said)


def pruned(config: Any) -> None:
    config.model_config.multimodal_config.is_multimodal_pruning_enabled = lambda: True


def projected(config: Any) -> None:
    config.model_config.get_inputs_embeds_size = lambda: 3 * WIDTH


def measured(config: Any) -> None:
    config.ec_transfer_config.mm_encoder_output_widths = {"image": 4 * WIDTH, "audio": WIDTH}


def connector(change: Any, role: str) -> LookupBufferECConnector:
    config = vllm_config(role)
    change(config)
    return LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)


def asked(side: LookupBufferECConnector, name: str, modality: str = "image", **more: Any) -> bool:
    """Whether a new request's item is promised; one without media waits, and is not."""
    request = make_request(f"r-{name}", name, **more)
    for feature in request.mm_features:
        feature.modality = modality
    passes = side.ensure_cache_available(request, num_computed_tokens=0)
    is_promised = passes and side.has_cache_item(name)
    side.build_connector_meta(step_output(finished=[request.request_id]))
    return is_promised


@pytest.mark.parametrize("role", ["ec_both", "ec_consumer"])
@pytest.mark.parametrize(
    ("change", "modality", "stored", "reason"),
    [
        (plain, "image", {}, ""),
        (plain, "image", {"width": 2 * WIDTH}, "shape"),
        (plain, "image", {"width": WIDTH // 2}, "shape"),
        (plain, "image", {"rows": 3}, "shape"),
        (plain, "image", {"dtype": "bfloat16"}, "dtype"),
        (plain, "image", {"dtype": "float16"}, "dtype"),
        (plain, "image", {"dtype": "int32"}, "dtype"),
        (no_deepstack, "image", {"width": 4 * WIDTH}, "shape"),
        (deepstack, "image", {"width": 4 * WIDTH}, ""),
        (deepstack, "audio", {}, ""),
        (deepstack, "image", {"width": WIDTH // 2}, "shape"),
        (deepstack, "image", {"width": 2 * WIDTH}, "shape"),
        (deepstack, "image", {"width": 8 * WIDTH}, "shape"),
        (pruned, "video", {"width": WIDTH + 4}, ""),
        (pruned, "video", {"width": 20 * WIDTH}, "shape"),
        (projected, "image", {"width": 3 * WIDTH}, ""),
        (projected, "image", {}, "shape"),
        (measured, "image", {"width": 4 * WIDTH}, ""),
        (measured, "audio", {}, ""),
        (measured, "image", {}, "shape"),
        (measured, "audio", {"width": 4 * WIDTH}, "shape"),
        (measured, "video", {"width": 4 * WIDTH}, ""),
        (measured, "image", {"width": 8 * WIDTH}, "shape"),
    ],
)
def test_what_is_promised(
    role: str,
    change: Any,
    modality: str,
    stored: dict[str, Any],
    reason: str,
    buffer: LedgerBuffer,
) -> None:
    buffer.stored["A"] = Stored(**stored)
    side = connector(change, role)
    assert asked(side, "A", modality) is not bool(reason)
    counted = side.get_ec_connector_stats()
    missed = {name for name in (counted.reduce() if counted else ()) if name.startswith("miss:")}
    assert missed == ({f"miss:{reason}"} if reason else set())
    assert not buffer.pinned


def test_an_encoder_of_another_dtype_is_learned_from_what_a_worker_encodes(
    buffer: LedgerBuffer,
) -> None:
    """By the connector's own way from worker to scheduler."""
    buffer.stored |= {"A": Stored(dtype="float16"), "B": Stored(dtype="bfloat16")}
    side = connector(plain, "ec_both")
    assert not asked(side, "A")
    request = make_request("own", "C")
    assert side.ensure_cache_available(request, num_computed_tokens=0)
    side.update_state_after_alloc(request, 0)
    metadata = side.build_connector_meta(step_output())
    worker = LookupBufferECConnector(vllm_config(), ECConnectorRole.WORKER)
    cache = {"C": torch.zeros(4, WIDTH, dtype=torch.float16), "other": torch.zeros(4, 9)}
    for step in (metadata, StepMetadata()):
        worker.bind_connector_metadata(step)
        worker.start_load_caches(cache)
        told = worker.build_connector_worker_meta()
        side.update_connector_output(SimpleNamespace(ec_connector_worker_meta=told))
    assert isinstance(told, WorkerCounts)
    assert worker.build_connector_worker_meta() is None, "it is told once"
    assert asked(side, "A")
    assert not asked(side, "B")


def test_who_cannot_encode_takes_another_dtype_until_its_own_is_known(buffer: LedgerBuffer) -> None:
    """vLLM casts what it is given; so an encoder of another dtype than the model's is served."""
    buffer.stored |= {"A": Stored(dtype="float16"), "B": Stored(dtype="int32")}
    side = connector(plain, "ec_consumer")
    assert asked(side, "A", metadata_only=True)
    assert not asked(side, "B", metadata_only=True)
    told = WorkerCounts({}, {("float32", WIDTH)})
    side.update_connector_output(SimpleNamespace(ec_connector_worker_meta=told))
    assert not asked(side, "A", metadata_only=True)
