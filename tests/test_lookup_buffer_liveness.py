"""Liveness: a node lives while its sequence moves, by the observer's clock alone."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.liveness import Liveness


def test_a_node_that_moves_lives_and_one_that_stands_still_dies() -> None:
    liveness = Liveness(dead_after_seconds=5.0)
    for second in range(20):
        liveness.observe({"moves": ("b", second), "stands": ("b", 7)}, float(second))
        assert liveness.alive("moves", "b", float(second))
        assert liveness.alive("stands", "b", float(second)) == (second <= 5)


def test_another_boot_is_another_node() -> None:
    liveness = Liveness()
    liveness.observe({"n": ("old", 3)}, 0.0)
    liveness.observe({"n": ("new", 3)}, 1.0)
    assert not liveness.alive("n", "old", 1.0)
    assert liveness.alive("n", "new", 1.0)
    assert list(liveness.boots()) == [("n", "new")]


def test_a_sequence_that_starts_anew_is_a_sign_of_life() -> None:
    liveness = Liveness(dead_after_seconds=5.0)
    liveness.observe({"n": ("b", 900)}, 0.0)
    liveness.observe({"n": ("b", 1)}, 4.0)
    assert liveness.alive("n", "b", 8.9)
    assert not liveness.alive("n", "b", 9.1)


def test_who_left_is_dead_at_once() -> None:
    liveness = Liveness()
    liveness.observe({"n": ("b", 1)}, 0.0)
    liveness.observe({}, 0.1)
    assert not liveness.alive("n", "b", 0.1)
    assert not liveness.alive("never seen", "b", 0.1)


def test_no_answer_of_the_store_is_not_a_death_by_itself() -> None:
    """Between two readings time alone decides."""
    liveness = Liveness(dead_after_seconds=5.0)
    liveness.observe({"n": ("b", 1)}, 0.0)
    assert liveness.alive("n", "b", 5.0)
    assert not liveness.alive("n", "b", 5.01)
    liveness.observe({"n": ("b", 40)}, 30.0)
    assert liveness.alive("n", "b", 30.0)


readings = st.lists(
    st.tuples(
        st.floats(0.01, 3.0),
        st.dictionaries(
            st.sampled_from("xyz"), st.tuples(st.sampled_from(["b1", "b2"]), st.integers(0, 3))
        ),
    ),
    max_size=30,
)


@given(readings)
def test_it_agrees_with_the_definition(
    history: list[tuple[float, Mapping[str, tuple[str, int]]]],
) -> None:
    """Alive: present in the last reading, with this boot, and changed within the bound."""
    liveness = Liveness(dead_after_seconds=5.0)
    now, changed = 0.0, dict[str, tuple[tuple[str, int], float]]()
    for pause, beats in history:
        now += pause
        liveness.observe(beats, now)
        changed = {
            node: changed[node] if node in changed and changed[node][0] == beat else (beat, now)
            for node, beat in beats.items()
        }
        for node in "xyz":
            for boot in ("b1", "b2"):
                beat, since = changed.get(node, (("", 0), 0.0))
                expected = beat[0] == boot and now - since <= 5.0
                assert liveness.alive(node, boot, now) == expected
