"""One name for two contents: what fits one request is never loaded for the other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from connector_standins import EMBEDS, WAIT_SECONDS, Bench, Position, Request, make_request
from connectors.ec.meanings import Meanings
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey
from nodes import wait_until

LONGER = EMBEDS + 5


def longer(request: Request) -> Request:
    """Its first item has more rows than what the fleet has under that name."""
    feature = request.mm_features[0]
    feature.mm_position = Position(feature.mm_position.offset, LONGER)
    return request


def test_what_is_meant_is_what_the_request_means_that_vllm_asks_for() -> None:
    meanings = Meanings()
    one = {"A": {(TensorKey("A"), 4)}, "B": {(TensorKey("B"), 4)}}
    other = {"A": {(TensorKey("A"), 9)}, "B": {(TensorKey("B"), 4)}}
    for meant in (one, other, one):
        meanings.add(meant)
    assert set(meanings.of("A")) == {(TensorKey("A"), 4), (TensorKey("A"), 9)}
    assert meanings.of("B") == ((TensorKey("B"), 4),)
    assert meanings.of("C") == ()
    meanings.asking = other
    assert meanings.of("A") == ((TensorKey("A"), 9),)
    meanings.asking = None
    meanings.remove(one)
    assert len(meanings.of("A")) == 2
    meanings.remove(other)
    assert meanings.of("A") == ((TensorKey("A"), 4),)
    meanings.remove(one)
    assert len(meanings) == 0


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("has_room", [True, False], ids=["at once", "in a later pass"])
def test_a_name_used_again_for_longer_content_is_encoded(is_first: bool, has_room: bool) -> None:
    """Loaded, it would end the engine: vLLM asks for the item by its name alone."""
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    fitting, misfit = make_request("fitting", "A"), longer(make_request("misfit", "A"))
    requests = [misfit, fitting] if is_first else [fitting, misfit]
    passed = {request.request_id: bench.ensure(request) for request in requests}
    assert passed == {"fitting": True, "misfit": True}
    if not has_room:
        bench.build(0)
    assert bench.ensure(misfit)
    assert not bench.allocate(misfit)
    assert bench.build().mm_datas == []


def test_in_one_pass_each_is_told_what_fits_it() -> None:
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


def test_hosts_that_do_not_say_who_asks_are_told_no_while_it_is_disputed() -> None:
    """Before 0.30 the gate is not asked for requests that run."""
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    assert bench.ensure(make_request("fitting", "A"))
    assert bench.ensure(longer(make_request("misfit", "A")))
    bench.build(0)
    assert not bench.scheduler.has_cache_item("A")
    bench.build(0)
    bench.scheduler.gate.forget("misfit")
    assert bench.scheduler.has_cache_item("A")


def test_who_carries_no_media_is_not_held_up_by_who_uses_its_name_for_something_else() -> None:
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
    bench.buffer.settle(0, PrefetchState.RESIDENT)  # it was asked for once more
    for _ in range(2):
        bench.clock.now += WAIT_SECONDS / 2
        assert not bench.ensure(misfit)
    unavailable = bench.scheduler.gate.take_unavailable_requests()
    assert {name: why.reason for name, why in unavailable.items()} == {"misfit": "shape"}
    for request_id in ("bare", "misfit"):
        bench.scheduler.gate.forget(request_id)
    assert len(bench.scheduler.meanings) == 0


def test_one_request_without_media_that_names_two_contents_alike_fails() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    request = make_request("r", "A", "A", metadata_only=True)
    request.mm_features[0].mm_position = Position(2, LONGER)
    request.mm_features[1].mm_position = Position(LONGER + 4, EMBEDS)
    for _ in range(3):
        assert not bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 2
    assert bench.scheduler.gate.take_unavailable_requests()["r"].reason == "shape"


def test_one_request_that_names_two_contents_alike_gets_neither() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    request = make_request("r", "A", "A")
    request.mm_features[0].mm_position = Position(2, LONGER)
    request.mm_features[1].mm_position = Position(LONGER + 4, EMBEDS)
    assert bench.ensure(request)
    assert not bench.allocate(request, 0)


def test_an_adapter_loaded_anew_under_its_name_gets_nothing_of_the_former(tmp_path: Path) -> None:
    """While the former's requests are still there, and its own files are not read yet."""
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
