"""One name for two contents: what fits one request is never loaded for the other."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from connector_standins import EMBEDS, Position, Request, make_request
from connectors.ec_meanings import Meanings
from lookup_buffer.key import TensorKey
from nodes import wait_until
from scheduler_bench import WAIT_SECONDS, Bench

LONGER = EMBEDS + 5


def longer(request: Request) -> Request:
    """Its first item has more rows than what the fleet has under that name."""
    feature = request.mm_features[0]
    feature.mm_position = Position(feature.mm_position.offset, LONGER)
    return request


def test_what_two_requests_mean_differently_is_disputed_until_one_of_them_is_gone() -> None:
    meanings = Meanings()
    one = {"A": {(TensorKey("A"), 4)}, "B": {(TensorKey("B"), 4)}}
    other = {"A": {(TensorKey("A"), 9)}, "B": {(TensorKey("B"), 4)}}
    for meant in (one, other, one):
        meanings.add(meant)
    assert meanings.disputed("A")
    assert not meanings.disputed("B")
    assert not meanings.disputed("C")
    meanings.remove(one)
    assert meanings.disputed("A")
    meanings.remove(other)
    assert not meanings.disputed("A")
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
    assert not bench.allocate(misfit)
    assert bench.build().mm_datas == []


def test_a_name_promised_in_this_pass_holds_who_means_something_else_until_the_next() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    fitting, misfit = make_request("fitting", "A"), longer(make_request("misfit", "A"))
    assert bench.ensure(fitting)
    assert bench.scheduler.has_cache_item("A")  # and then vLLM finds no room for it
    assert not bench.ensure(misfit)
    bench.build(0)
    assert bench.ensure(misfit)
    assert not bench.allocate(misfit)


def test_who_carries_no_media_waits_while_its_name_is_disputed() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    bare, misfit = (
        make_request("bare", "A", metadata_only=True),
        longer(make_request("misfit", "A")),
    )
    assert bench.ensure(misfit)
    assert not bench.ensure(bare)
    bench.build(0)
    bench.scheduler.gate.forget("misfit")
    bench.clock.now += 0.1
    assert bench.ensure(bare)
    assert bench.allocate(bare)
    (load,) = bench.build().mm_datas
    assert load.num_token == EMBEDS
    bench.scheduler.gate.forget("bare")
    assert len(bench.scheduler.gate.meanings) == 0


def test_who_carries_no_media_fails_where_its_name_stays_disputed() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    bare, misfit = (
        make_request("bare", "A", metadata_only=True),
        longer(make_request("misfit", "A")),
    )
    assert bench.ensure(misfit)
    for _ in range(3):
        assert not bench.ensure(bare)
        bench.clock.now += WAIT_SECONDS / 2
    assert bench.scheduler.gate.take_unavailable_requests() == {"bare"}


def test_a_pin_for_content_of_another_size_is_not_taken_over() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    assert bench.ensure(make_request("fitting", "A"))
    misfit = longer(make_request("misfit", "A"))
    assert bench.ensure(misfit)
    bench.scheduler.gate.forget("fitting")
    assert bench.buffer.pinned == {} or not bench.scheduler.has_cache_item("A")
    assert not bench.allocate(misfit)
    assert bench.scheduler.counters.totals()["miss:shape"] == 1


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
