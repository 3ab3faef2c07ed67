"""What vLLM's own cache holds and the buffer has lost: which of it the workers store again."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import EMBEDS, Bench, make_request, pixels, step_output

BOTH: dict[str, Any] = {}
PRODUCER: dict[str, Any] = {"consumer": False}
CONSUMER: dict[str, Any] = {"producer": False}


class Engine(Bench):
    """With vLLM's own cache, of which it asks nobody."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cached: set[str] = set()

    def serve(self, name: str, *identifiers: str, **fields: Any) -> Any:
        """A request from its first sight to its end: what the workers are told in its step."""
        request = make_request(name, *identifiers)
        for feature in request.mm_features:
            feature.data = {**(feature.data or {}), **fields}
        assert self.ensure(request)
        for index, feature in enumerate(request.mm_features):
            if feature.identifier not in self.cached:
                self.cached.add(feature.identifier)
                self.allocate(request, index)
        output = step_output(1, scheduled=[name])
        output.scheduled_encoder_inputs = {}
        metadata = self.scheduler.build_metadata(output)
        self.build(finished=[name])
        return SimpleNamespace(metadata=metadata, added=output.scheduled_encoder_inputs)


@pytest.mark.parametrize("role", [BOTH, PRODUCER], ids=["both", "producer"])
def test_what_was_lost_is_stored_again(role: dict[str, Any]) -> None:
    bench = Engine(**role)
    assert bench.serve("first", "A").metadata.saves == {"A": "A"}
    bench.store("A")
    assert bench.serve("second", "A").metadata.lost == {}
    del bench.buffer.stored["A"]
    third = bench.serve("third", "A").metadata
    assert third.lost == {"A": "A"}
    assert third.saves == {}
    assert bench.serve("fourth", "A").metadata.lost == {}, "it is being stored"
    bench.clock.now += 2
    assert bench.serve("fifth", "A").metadata.lost == {"A": "A"}, "it was not stored after all"


def test_what_was_loaded_and_then_lost_is_stored_again() -> None:
    bench = Engine()
    bench.store("A")
    assert bench.serve("first", "A").metadata.mm_datas
    del bench.buffer.stored["A"]
    assert bench.serve("second", "A").metadata.lost == {"A": "A"}


def test_a_request_is_looked_at_once() -> None:
    bench = Engine()
    bench.serve("first", "A")
    bench.store("A")
    request = make_request("second", "A")
    for _ in range(5):
        assert bench.ensure(request)
        bench.build(0)
    assert [name for name, _, _ in bench.buffer.calls].count("has_caches") == 1 + 1, (
        "by the first for the right to encode, and by the second"
    )


def test_whoever_stores_nothing_asks_for_nothing() -> None:
    bench = Engine(**CONSUMER)
    bench.serve("first", "A")
    bench.buffer.calls.clear()
    assert bench.serve("second", "A").metadata.lost == {}
    assert bench.buffer.calls == []


def test_what_a_client_supplied_is_never_stored_under_a_name_of_ours() -> None:
    """Its embeddings lie in vLLM's cache under the name that another request gives its media."""
    bench = Engine()
    bench.serve("supplied", "A", image_embeds=pixels()["pixel_values"])
    assert bench.serve("encoded", "A").metadata.lost == {}


def test_what_is_still_to_run_waits_for_a_step_that_does() -> None:
    bench = Engine()
    bench.serve("first", "A")
    assert bench.ensure(make_request("second", "A"))
    assert bench.build(0).lost == {}, "a step without tokens never reaches the worker"
    assert bench.build(1).lost == {"A": "A"}


def test_a_producer_encodes_what_it_had_skipped_and_the_buffer_lost() -> None:
    bench = Engine(**PRODUCER)
    bench.store("A")
    first = bench.serve("first", "A")
    assert first.metadata.saves == {}
    second = bench.serve("second", "A")
    assert second.added == {}
    del bench.buffer.stored["A"]
    third = bench.serve("third", "A")
    assert third.added == {"third": [0]}
    assert third.metadata.saves == {"A": "A"}
    assert third.metadata.lost == {}
    fourth = bench.serve("fourth", "A")
    assert fourth.added == {}, "now it has it"
    assert fourth.metadata.lost == {"A": "A"}


def test_a_producer_encodes_no_more_in_a_step_than_vllm_would() -> None:
    bench = Engine(**PRODUCER, encode_rows=2 * EMBEDS)
    names = "ABCD"
    for name in names:
        bench.store(name)
    bench.serve("first", *names)
    bench.buffer.stored.clear()
    added = [bench.serve(f"later-{turn}", *names).added for turn in range(3)]
    assert [[*one.values()] for one in added] == [[[0, 1]], [[2, 3]], []]


def test_what_vllm_has_dropped_is_encoded_by_vllm() -> None:
    bench = Engine(**PRODUCER)
    bench.store("A")
    bench.serve("first", "A")
    bench.build(freed=["A"])
    bench.cached.clear()
    bench.buffer.stored.clear()
    again = bench.serve("again", "A")
    assert again.metadata.saves == {"A": "A"}
    assert again.added == {}, "it is allocated, and scheduled by vLLM itself"
