"""Items that vLLM's own cache holds and the buffer has lost: which of them workers store again."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import EMBEDS, Bench, make_request, pixels, step_output

BOTH: dict[str, Any] = {}
PRODUCER: dict[str, Any] = {"consumer": False}
CONSUMER: dict[str, Any] = {"producer": False}


class Engine(Bench):
    """A bench with vLLM's own cache, whose hits never reach the connector."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cached: set[str] = set()

    def serve(self, name: str, *identifiers: str, **fields: Any) -> Any:
        """Run a request from its first poll to its end, and return what the workers get in its
        step."""
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
def test_a_lost_item_is_stored_again(role: dict[str, Any]) -> None:
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


def test_a_new_boot_of_the_node_gets_the_item_at_once() -> None:
    """The order of a moment ago went to a node that has died since."""
    bench = Engine()
    bench.serve("first", "A")
    assert bench.serve("second", "A").metadata.lost == {"A": "A"}
    assert bench.serve("third", "A").metadata.lost == {}
    bench.buffer.lose_session()
    assert bench.serve("fourth", "A").metadata.lost == {"A": "A"}


def test_a_loaded_item_that_was_lost_is_stored_again() -> None:
    bench = Engine()
    bench.store("A")
    assert bench.serve("first", "A").metadata.mm_datas
    del bench.buffer.stored["A"]
    assert bench.serve("second", "A").metadata.lost == {"A": "A"}


def test_a_request_is_checked_once() -> None:
    bench = Engine()
    bench.serve("first", "A")
    bench.store("A")
    request = make_request("second", "A")
    for _ in range(5):
        assert bench.ensure(request)
        bench.build(0)
    assert [name for name, _, _ in bench.buffer.calls].count("has_caches") == 1 + 1, (
        "one lookup by the first request before its claim, one by the second"
    )


def test_a_consumer_checks_nothing() -> None:
    bench = Engine(**CONSUMER)
    bench.serve("first", "A")
    bench.buffer.calls.clear()
    assert bench.serve("second", "A").metadata.lost == {}
    assert bench.buffer.calls == []


def test_embeddings_of_a_client_are_never_stored_under_an_items_key() -> None:
    """The embeddings are in vLLM's cache under the identifier that another request gives its
    media."""
    bench = Engine()
    bench.serve("supplied", "A", image_embeds=pixels()["pixel_values"])
    assert bench.serve("encoded", "A").metadata.lost == {}


def test_items_to_store_again_wait_for_a_step_with_tokens() -> None:
    bench = Engine()
    bench.serve("first", "A")
    assert bench.ensure(make_request("second", "A"))
    assert bench.build(0).lost == {}, "a step without tokens never reaches the worker"
    assert bench.build(1).lost == {"A": "A"}


def test_a_producer_encodes_a_skipped_item_that_was_lost() -> None:
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
    assert fourth.added == {}, "it is in vLLM's cache now"
    assert fourth.metadata.lost == {"A": "A"}


def test_added_encodes_stay_within_vllms_limit_per_step() -> None:
    bench = Engine(**PRODUCER, encode_rows=2 * EMBEDS)
    names = "ABCD"
    for name in names:
        bench.store(name)
    bench.serve("first", *names)
    bench.buffer.stored.clear()
    added = [bench.serve(f"later-{turn}", *names).added for turn in range(3)]
    assert [[*one.values()] for one in added] == [[[0, 1]], [[2, 3]], []]


def test_an_item_that_vllm_evicted_is_encoded_by_vllm() -> None:
    bench = Engine(**PRODUCER)
    bench.store("A")
    bench.serve("first", "A")
    bench.build(freed=["A"])
    bench.cached.clear()
    bench.buffer.stored.clear()
    again = bench.serve("again", "A")
    assert again.metadata.saves == {"A": "A"}
    assert again.added == {}, "it is allocated, and scheduled by vLLM itself"
