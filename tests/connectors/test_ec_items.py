"""One identifier for two contents: bytes that fit one request are never loaded for the other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from connector_standins import EMBEDS, WAIT_SECONDS, Bench, Position, Request, make_request
from connectors.ec.items import ItemVariants
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey
from nodes import wait_until

LONGER = EMBEDS + 5


def longer(request: Request) -> Request:
    """Give the first item more rows than the stored item of that name."""
    feature = request.mm_features[0]
    feature.mm_position = Position(feature.mm_position.offset, LONGER)
    return request


def test_the_variants_are_those_of_the_request_being_scheduled() -> None:
    variants = ItemVariants()
    one = {"A": {(TensorKey("A"), 4)}, "B": {(TensorKey("B"), 4)}}
    other = {"A": {(TensorKey("A"), 9)}, "B": {(TensorKey("B"), 4)}}
    for meant in (one, other, one):
        variants.add(meant)
    assert set(variants.of("A")) == {(TensorKey("A"), 4), (TensorKey("A"), 9)}
    assert variants.of("B") == ((TensorKey("B"), 4),)
    assert variants.of("C") == ()
    variants.current = other
    assert variants.of("A") == ((TensorKey("A"), 9),)
    variants.current = None
    variants.remove(one)
    assert len(variants.of("A")) == 2
    variants.remove(other)
    assert variants.of("A") == ((TensorKey("A"), 4),)
    variants.remove(one)
    assert len(variants) == 0


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("has_space", [True, False], ids=["at once", "in a later pass"])
def test_an_identifier_reused_for_longer_content_is_encoded(
    is_first: bool, has_space: bool
) -> None:
    """A load would end the engine, because vLLM requests the item by its identifier alone."""
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    fitting, misfit = make_request("fitting", "A"), longer(make_request("misfit", "A"))
    requests = [misfit, fitting] if is_first else [fitting, misfit]
    passed = {request.request_id: bench.ensure(request) for request in requests}
    assert passed == {"fitting": True, "misfit": True}
    if not has_space:
        bench.build(0)
    assert bench.ensure(misfit)
    assert not bench.allocate(misfit)
    assert bench.build().mm_datas == []


def test_each_request_of_a_pass_gets_the_answer_for_its_variant() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    fitting, misfit = make_request("fitting", "A"), longer(make_request("misfit", "A"))
    for request, fits in ((fitting, True), (misfit, False), (fitting, True)):
        assert bench.ensure(request)
        assert bench.scheduler.has_cache_item("A") is fits
    assert bench.allocate(fitting)
    (load,) = bench.build().mm_datas
    assert load.num_token == EMBEDS
    assert bench.scheduler.counters.totals()["miss:shape"] == 1


def test_without_the_current_request_an_identifier_with_two_variants_is_a_miss() -> None:
    """vLLM before 0.30 does not call the gate for requests that run."""
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    assert bench.ensure(make_request("fitting", "A"))
    assert bench.ensure(longer(make_request("misfit", "A")))
    bench.build(0)
    assert not bench.scheduler.has_cache_item("A")
    bench.build(0)
    bench.scheduler.gate.forget("misfit")
    assert bench.scheduler.has_cache_item("A")


def test_a_request_without_media_is_not_delayed_by_another_variant_of_its_item() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A", needs_fetch=True)
    bare, misfit = (
        make_request("bare", "A", metadata_only=True),
        make_request("misfit", "A", metadata_only=True),
    )
    longer(misfit)
    for _ in range(3):
        assert not bench.ensure(misfit)
        assert not bench.ensure(bare)
        bench.build(0)
        bench.clock.now += 0.1
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert not bench.ensure(misfit)
    assert bench.ensure(bare)
    assert bench.allocate(bare)
    assert len(bench.build().mm_datas) == 1
    bench.buffer.settle(0, PrefetchState.RESIDENT)  # from the repeated prefetch
    for _ in range(2):
        bench.clock.now += WAIT_SECONDS / 2
        assert not bench.ensure(misfit)
    unavailable = bench.scheduler.gate.take_unavailable_requests()
    assert {name: why.reason for name, why in unavailable.items()} == {"misfit": "shape"}
    for request_id in ("bare", "misfit"):
        bench.scheduler.gate.forget(request_id)
    assert len(bench.scheduler.variants) == 0


def test_a_request_without_media_with_two_variants_of_one_identifier_fails() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    request = make_request("r", "A", "A", metadata_only=True)
    request.mm_features[0].mm_position = Position(2, LONGER)
    request.mm_features[1].mm_position = Position(LONGER + 4, EMBEDS)
    for _ in range(3):
        assert not bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 2
    assert bench.scheduler.gate.take_unavailable_requests()["r"].reason == "shape"


def test_a_request_with_two_variants_of_one_identifier_loads_neither() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    request = make_request("r", "A", "A")
    request.mm_features[0].mm_position = Position(2, LONGER)
    request.mm_features[1].mm_position = Position(LONGER + 4, EMBEDS)
    assert bench.ensure(request)
    assert not bench.allocate(request, 0)


def test_an_adapter_loaded_again_under_its_name_gets_no_items_of_the_former_one(
    tmp_path: Path,
) -> None:
    """Requests of the former adapter are still there, and the new one's files are not read yet."""
    bench = Bench(claim_wait_seconds=0)
    (tmp_path / "adapter_model.bin").write_bytes(b"w")
    former, anew = make_request("former", "cats:A"), make_request("anew", "cats:A")
    former.lora_request = SimpleNamespace(lora_name="cats", lora_int_id=1, lora_path=str(tmp_path))
    anew.lora_request = SimpleNamespace(lora_name="cats", lora_int_id=2, lora_path="/nowhere")
    adapters = bench.scheduler.gate._adapters
    wait_until(lambda: adapters.digest_of(former.lora_request), 5.0)
    bench.store("A")
    assert bench.ensure(former)
    assert bench.ensure(anew)
    assert not bench.allocate(anew)
    assert bench.build().saves == {}
