"""Liveness: a node lives while its sequence moves, by the observer's clock alone."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.node.membership import Liveness


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


def test_a_node_that_shut_down_is_dead_at_once() -> None:
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


# -- for how long a node has been dead


def watched(*, until: float, beats: Mapping[str, tuple[str, int]]) -> Liveness:
    """Two nodes that beat at first; from second 10 on the readings are `beats`, each second."""
    liveness = Liveness(dead_after_seconds=5.0)
    for second in range(int(until) + 1):
        both = {"x": ("b", second), "y": ("b", second)}
        liveness.observe(both if second < 10 else {**beats, "y": ("b", second)}, float(second))
    return liveness


def test_a_beat_without_change_while_it_was_read_means_dead() -> None:
    still = {"x": ("b", 9)}
    assert watched(until=14, beats=still).dead_seconds("x", "b") == 0.0
    assert watched(until=75, beats=still).dead_seconds("x", "b") == 66.0
    assert watched(until=75, beats=still).dead_seconds("y", "b") == 0.0


def test_a_node_that_shut_down_stays_dead_while_it_is_observed() -> None:
    assert watched(until=75, beats={}).dead_seconds("x", "b") == 75.0
    assert watched(until=75, beats={}).dead_seconds("never seen", "b") == 75.0
    assert watched(until=4, beats={}).dead_seconds("never seen", "b") == 0.0
    assert Liveness().dead_seconds("x", "b") == 0.0


def test_a_boot_that_was_replaced_is_dead_for_ever() -> None:
    liveness = watched(until=11, beats={"x": ("new", 1)})
    assert liveness.dead_seconds("x", "b") == float("inf")
    assert liveness.dead_seconds("x", "new") == 0.0


def test_silence_between_two_distant_reads_does_not_count() -> None:
    """The store was away for a minute: no node could beat."""
    liveness = watched(until=75, beats={"x": ("b", 9)})
    before = {"x": ("b", 9), "y": ("b", 75)}
    liveness.observe(before, 140.0)
    assert liveness.dead_seconds("x", "b") == 0.0
    assert liveness.dead_seconds("y", "b") == 0.0
    for second in range(141, 147):
        liveness.observe({**before, "y": ("b", second)}, float(second))
    assert liveness.dead_seconds("x", "b") == 6.0
    assert liveness.dead_seconds("y", "b") == 0.0


def test_after_a_loss_of_the_store_no_node_counts_as_shut_down() -> None:
    liveness = watched(until=75, beats={"x": ("b", 9)})
    liveness.observe({}, 75.5, complete=False)
    assert liveness.alive("y", "b", 75.5)
    assert not liveness.alive("x", "b", 75.5), "a node that was silent before stays dead"
    assert liveness.dead_seconds("x", "b") == 0.0, "but the silence is counted from zero"
    liveness.observe({"y": ("b", 76)}, 76.5)
    assert liveness.alive("y", "b", 76.5)
    assert not liveness.alive("x", "b", 76.5)
