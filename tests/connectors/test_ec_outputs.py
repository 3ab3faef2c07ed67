"""Which stored tensors count as encoder outputs, by vLLM's configuration of the model."""

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
    hf_config = {"vision_config": {"deepstack_visual_indexes": [8, 16, 24]}, "layers": [{}, 1]}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: hf_config)


def no_deepstack(config: Any) -> None:
    hf_config: dict[str, Any] = {"vision_config": {"deepstack_visual_indexes": []}}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: hf_config)


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


def is_promised(
    side: LookupBufferECConnector, name: str, modality: str = "image", **more: Any
) -> bool:
    """Whether a new request's item is promised. A request without media is not
    promised while it waits."""
    request = make_request(f"r-{name}", name, **more)
    for feature in request.mm_features:
        feature.modality = modality
    passes = side.ensure_cache_available(request, num_computed_tokens=0)
    promised = passes and side.has_cache_item(name)
    side.build_connector_meta(step_output(finished=[request.request_id]))
    return promised


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
def test_only_possible_outputs_are_promised(
    role: str,
    change: Any,
    modality: str,
    stored: dict[str, Any],
    reason: str,
    buffer: LedgerBuffer,
) -> None:
    buffer.stored["A"] = Stored(**stored)
    side = connector(change, role)
    assert is_promised(side, "A", modality) is not bool(reason)
    counted = side.get_ec_connector_stats()
    missed = {name for name in (counted.reduce() if counted else ()) if name.startswith("miss:")}
    assert missed == ({f"miss:{reason}"} if reason else set())
    assert not buffer.pinned


def test_the_encoders_dtype_is_read_from_a_workers_output(
    buffer: LedgerBuffer,
) -> None:
    """The report goes through the connector, from worker to scheduler."""
    buffer.stored |= {"A": Stored(dtype="float16"), "B": Stored(dtype="bfloat16")}
    side = connector(plain, "ec_both")
    assert not is_promised(side, "A")
    request = make_request("own", "C")
    assert side.ensure_cache_available(request, num_computed_tokens=0)
    side.update_state_after_alloc(request, 0)
    metadata = side.build_connector_meta(step_output())
    worker = LookupBufferECConnector(vllm_config(), ECConnectorRole.WORKER)
    cache = {"C": torch.zeros(4, WIDTH, dtype=torch.float16), "other": torch.zeros(4, 9)}
    for step in (metadata, StepMetadata()):
        worker.bind_connector_metadata(step)
        worker.start_load_caches(cache)
        report = worker.build_connector_worker_meta()
        side.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
    assert isinstance(report, WorkerCounts)
    assert worker.build_connector_worker_meta() is None, "it is reported once"
    assert is_promised(side, "A")
    assert not is_promised(side, "B")


def test_a_request_without_media_accepts_another_float_dtype_until_the_own_is_known(
    buffer: LedgerBuffer,
) -> None:
    """vLLM casts what it gets, so an encoder with another dtype than the model's is supported."""
    buffer.stored |= {"A": Stored(dtype="float16"), "B": Stored(dtype="int32")}
    side = connector(plain, "ec_consumer")
    assert is_promised(side, "A", metadata_only=True)
    assert not is_promised(side, "B", metadata_only=True)
    report = WorkerCounts({}, {("float32", WIDTH)})
    side.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
    assert not is_promised(side, "A", metadata_only=True)
