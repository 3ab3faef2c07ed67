"""`LookupBufferECConnector` inside vLLM: found by name, routed by role, true to vLLM's
conventions."""

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector_standins import EMBED_BYTES, EMBEDS, LedgerBuffer, Stored, make_request, step_output
from lookup_buffer.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from connectors import client
from connectors.ec import connector as ec_connector
from connectors.ec import seat as ec_seat
from connectors.ec.connector import LookupBufferECConnector
from connectors.identifiers import MetadataFields
from connectors.namespace import Identity
from connectors.plugin import CONNECTOR_MODULE, CONNECTOR_NAME, register
from connectors.settings import parse_settings
from connectors.weights import WeightsSource


def vllm_config(role: str = "ec_both", **extra: Any) -> Any:
    return SimpleNamespace(
        ec_transfer_config=ECTransferConfig(
            ec_connector=CONNECTOR_NAME,
            ec_role=role,
            ec_connector_module_path=CONNECTOR_MODULE,
            ec_connector_extra_config={"capacity_bytes": "64MiB", **extra},
        ),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=4),
            dtype=torch.float32,
            get_hidden_size=lambda: EMBED_BYTES // 4,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=8192),
        parallel_config=SimpleNamespace(
            rank=0,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        max_concurrent_batches=1,
    )


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> LedgerBuffer:
    buffer = LedgerBuffer()
    monkeypatch.setattr(ec_seat, "open_buffer", lambda *_, rank: buffer)
    identity = Identity({}, WeightsSource("tests"))
    monkeypatch.setattr(ec_seat, "identity", lambda *_: identity)
    return buffer


@pytest.fixture
def scheduler(buffer: LedgerBuffer) -> LookupBufferECConnector:
    return LookupBufferECConnector(vllm_config(), ECConnectorRole.SCHEDULER)


def test_found_by_module_path_and_by_name(buffer: LedgerBuffer) -> None:
    config = vllm_config().ec_transfer_config
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector
    register()
    register()
    config.ec_connector_module_path = None
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector


def test_a_request_from_gate_to_metadata(
    scheduler: LookupBufferECConnector, buffer: LedgerBuffer
) -> None:
    buffer.stored["A"] = Stored()
    request = make_request("r", "A", "B")
    assert scheduler.ensure_cache_available(request, num_computed_tokens=0)
    assert [scheduler.has_cache_item(item) for item in "AB"] == [True, False]
    for index in (0, 1):
        scheduler.update_state_after_alloc(request, index)
    metadata = scheduler.build_connector_meta(step_output())
    assert isinstance(metadata, ECConnectorMetadata)
    assert [(data.mm_hash, data.num_token) for data in metadata.mm_datas] == [("A", EMBEDS)]
    assert metadata.saves == {"B": "B"}
    assert scheduler.request_finished(request) == (False, None)
    assert scheduler.take_unavailable_requests() == set()
    stats = scheduler.get_ec_connector_stats()
    loaded = EMBEDS * EMBED_BYTES
    assert stats.reduce() == {
        "claim:granted": 1,
        "load_local": 1,
        "loaded_local_bytes": loaded,
        "miss:absent": 1,
    }
    assert scheduler.get_ec_connector_stats() is None
    scheduler.shutdown()
    assert buffer.is_closed


def test_a_reader_loads_and_neither_claims_nor_stores(buffer: LedgerBuffer) -> None:
    config = vllm_config(read_only=True, store_url="redis://h:6379")
    reader = LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)
    buffer.stored["A"] = Stored()
    request = make_request("r", "A", "B")
    assert reader.ensure_cache_available(request, num_computed_tokens=0)
    for index in (0, 1):
        reader.update_state_after_alloc(request, index)
    metadata = reader.build_connector_meta(step_output())
    assert isinstance(metadata, ECConnectorMetadata)
    assert [data.mm_hash for data in metadata.mm_datas] == ["A"]
    assert metadata.saves == {}
    assert {name for name, _, _ in buffer.calls}.isdisjoint({"claim_all", "prefetch_and_claim"})
    assert buffer.fleet.encoding == []
    worker = LookupBufferECConnector(config, ECConnectorRole.WORKER).worker
    assert worker is not None
    assert worker.saves is None
    worker.close()


def test_an_engine_that_only_stores_is_no_reader(buffer: LedgerBuffer) -> None:
    config = vllm_config("ec_producer", read_only=True, store_url="redis://h:6379")
    with pytest.raises(
        ConfigError, match="'read_only' is on, and this engine has the role ec_producer"
    ):
        LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)


def test_an_item_that_does_not_name_the_adapter_that_encodes_it_is_not_shared(
    buffer: LedgerBuffer,
) -> None:
    """vLLM's Rust front end names items this way where adapters change encoder outputs."""
    config = vllm_config()
    config.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    scheduler = LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)
    buffer.stored["A"] = Stored()
    request = make_request("r", "A")
    request.lora_request = SimpleNamespace(lora_name="cats", lora_int_id=1, lora_path="/nowhere")
    assert scheduler.ensure_cache_available(request, num_computed_tokens=0)
    assert not scheduler.has_cache_item("A")
    scheduler.update_state_after_alloc(request, 0)
    metadata = scheduler.build_connector_meta(step_output())
    assert not metadata.mm_datas
    assert not metadata.saves
    assert not buffer.calls
    assert scheduler.get_ec_connector_stats().reduce() == {"skipped:lora": 1}


def test_an_encode_only_engine_reports_its_items_as_vllms_own_connectors_do(
    buffer: LedgerBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetadataFields, "fields_for", lambda *_: {"audio_num_tokens"})
    connector = LookupBufferECConnector(vllm_config("ec_producer"), ECConnectorRole.SCHEDULER)
    request = make_request("r", "A", "B", "A", metadata_only=True)
    metadata = {"audio_num_tokens": [EMBEDS]}
    reported = {
        "A": {"item_indices": [0, 2], "metadata": metadata},
        "B": {"item_indices": [1], "metadata": metadata},
    }
    assert connector.request_finished(request) == (False, reported)
    assert connector.request_finished(make_request("text")) == (False, None)


def test_stats_of_two_steps_add_up() -> None:
    one = LookupBufferECConnector.build_ec_connector_stats({"saved": 1})
    two = LookupBufferECConnector.build_ec_connector_stats({"saved": 2, "load_local": 1})
    assert one.aggregate(two).reduce() == {"load_local": 1, "saved": 3}


def test_a_replaced_has_cache_item_decides_what_is_loaded(
    scheduler: LookupBufferECConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "has_cache_item", lambda identifier: identifier == "A")
    request = make_request("r", "A", "B")
    for index in (0, 1):
        scheduler.update_state_after_alloc(request, index)
    metadata = scheduler.build_connector_meta(step_output())
    assert [data.mm_hash for data in metadata.mm_datas] == ["A"]
    assert metadata.mm_datas[0].order is None, "the worker has to look it up by its key"


def test_vllm_before_0_15_calls_has_caches(
    buffer: LedgerBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec_connector, "HAS_GATE", False)
    scheduler = LookupBufferECConnector(vllm_config(), ECConnectorRole.SCHEDULER)
    buffer.stored["B"] = Stored()
    request = make_request("r", "A", "B")
    assert scheduler.has_caches(request) == [False, True]
    scheduler.update_state_after_alloc(request, 1)
    metadata = scheduler.build_connector_meta(step_output(new=[request], encoded={"r": [0]}))
    assert [data.mm_hash for data in metadata.mm_datas] == ["B"]
    assert metadata.saves == {"A": "A"}, "vLLM did not report the encoded item"
    scheduler.shutdown()
    assert buffer.pinned == {}


def test_vllm_before_0_23_calls_has_cache_item(
    buffer: LedgerBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec_connector, "HAS_GATE", False)
    scheduler = LookupBufferECConnector(vllm_config(), ECConnectorRole.SCHEDULER)
    here = "a" * 64
    buffer.stored[here] = Stored()
    assert scheduler.has_cache_item(here)
    assert not scheduler.has_cache_item("b" * 64)
    scheduler.shutdown()
    assert buffer.pinned == {}


def test_worker_without_metadata_does_nothing(buffer: LedgerBuffer) -> None:
    worker = LookupBufferECConnector(vllm_config("ec_consumer"), ECConnectorRole.WORKER)
    worker.start_worker_services()
    cache: dict[str, Any] = {}
    worker.start_load_caches(cache)
    worker.save_caches(encoder_cache=cache, mm_hash="A")
    assert worker.get_ec_connector_stats() is None
    worker.shutdown()
    worker.shutdown()


def test_later_pipeline_stages_connect_to_nothing(
    buffer: LedgerBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.rank = 1
    connector = LookupBufferECConnector(config, ECConnectorRole.WORKER)
    assert connector.worker is None
    connector.start_worker_services()
    connector.shutdown()


def test_a_request_without_media_and_without_bytes_fails_with_one_log_line(
    buffer: LedgerBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = vllm_config("ec_consumer", metadata_wait_seconds=0)
    connector = LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)
    for name in ("first", "second"):
        request = make_request(name, "A", metadata_only=True)
        assert not connector.ensure_cache_available(request, num_computed_tokens=0)
    assert connector.take_unavailable_requests() == {"first", "second"}
    (line,) = [r.getMessage() for r in caplog.records if "request first fails" in r.getMessage()]
    assert "no node has A, and no engine has claimed it" in line


@pytest.mark.parametrize("role", list(ECConnectorRole))
def test_an_invalid_setting_ends_the_start_with_one_log_line(
    role: ECConnectorRole, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with pytest.raises(ConfigError, match="did you mean 'capacity_bytes'"):
        LookupBufferECConnector(vllm_config(capcity_bytes=1), role)
    (record,) = [r for r in caplog.records if "LookupBufferECConnector" in r.getMessage()]
    assert "'capcity_bytes'" in record.getMessage()


def test_counted_identifiers_end_the_start(buffer: LedgerBuffer) -> None:
    config = vllm_config()
    config.model_config.multimodal_config.mm_processor_cache_gb = 0
    with pytest.raises(ConfigError, match="repeats on every instance"):
        LookupBufferECConnector(config, ECConnectorRole.SCHEDULER)


def test_counts_of_workers_reach_the_statistics(
    scheduler: LookupBufferECConnector, buffer: LedgerBuffer
) -> None:
    reports = []
    for saved in (1, 2):
        worker = LookupBufferECConnector(vllm_config(), ECConnectorRole.WORKER)
        assert worker.worker is not None
        worker.worker.counters.add("saved", saved)
        counts = worker.build_connector_worker_meta()
        assert counts is not None
        reports.append(counts)
        assert worker.build_connector_worker_meta() is None  # reported once
    output = SimpleNamespace(ec_connector_worker_meta=reports[0].aggregate(reports[1]))
    scheduler.update_connector_output(output)
    assert scheduler.get_ec_connector_stats().data == {"saved": 3}
    scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=None))
    assert scheduler.get_ec_connector_stats() is None


@pytest.mark.parametrize("attribute", ["data_parallel_index", "data_parallel_rank"])
def test_data_parallel_engines_of_one_command_get_different_ids(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives them one id; older versions use another name for the rank."""
    ranks: list[Any] = []

    class Opened(LedgerBuffer):
        attached = False

        def __init__(self, *_: Any, engine: Any, **__: Any) -> None:
            super().__init__()
            ranks.append(engine)

    monkeypatch.setattr(client, "LookupBuffer", Opened)
    identity = Identity({}, WeightsSource("tests"))
    monkeypatch.setattr(ec_seat, "identity", lambda *_: identity)
    config = vllm_config()
    for index in (0, 1, 1):
        config.parallel_config = SimpleNamespace(
            rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, **{attribute: index}
        )
        ec_seat.open_buffer(config, parse_settings({}), rank=None if len(ranks) < 2 else 0)
    first, second, worker_of_second = (rank.engine_id for rank in ranks)
    assert first != second == worker_of_second
