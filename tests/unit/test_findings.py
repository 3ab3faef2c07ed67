"""Which namespaces are most alike. No server."""

import json
import time

from lookup_buffer.inspection.findings import differences, most_alike


def test_the_most_alike_come_first_each_beside_the_nearest_that_has_it() -> None:
    described = {
        "has-1": {"model": "m", "dtype": "a", "processor": '{"size": 1}'},
        "has-2": {"model": "n", "dtype": "b", "processor": '{"size": 9}'},
        "two": {"model": "m", "dtype": "c", "processor": '{"size": 2}'},
        "one": {"model": "n", "dtype": "b", "processor": '{"size": 8}'},
        "one, too": {"model": "m", "dtype": "a", "processor": '{"size": 7}'},
        "none": {"model": "m", "dtype": "a", "processor": '{"size":"1"}'},
        "four": {"tower": "t"},
    }
    without = {"undescribed", "four", "two", "one, too", "one", "none"}
    found = most_alike(described, without, ["has-2", "has-1"])
    assert list(found.items()) == [
        ("none", "has-1"),
        ("one", "has-2"),
        ("one, too", "has-1"),
        ("two", "has-1"),
        ("four", "has-1"),
        ("undescribed", "has-1"),
    ]
    assert differences(described["none"], described["has-1"]) == {}


def test_huge_parts_are_not_taken_apart() -> None:
    """Anybody who can write the store can write them: 17.9 MB of this form took 26 s."""
    for depth, filling in ((5, "x" * 100_000), (200, "")):
        value = f'{{"a":{filling!r}}}'.replace("'", '"')
        for _ in range(depth):
            value = f'{{"a": {value}}}'
        found = differences({"part": value}, {})
        assert len(found) == 1
        (name,) = found
        assert len(name) < 100


def test_holders_with_a_description_come_first() -> None:
    described = {"b": {"model": "m"}, "z": {"model": "n"}}
    assert most_alike(described, ["b", "c"], ["a", "z"]) == {"b": "z", "c": "z"}
    assert list(most_alike(described, ["c", "z", "b"], ["a"])) == ["b", "z", "c"]
    assert most_alike(described, [], ["a"]) == {}


def test_hundreds_of_namespaces_take_no_time() -> None:
    """A second of processor time here; 26 s where each pair was read as JSON."""
    parts = {f"part {n}": '{"a": 1, "b": [2, 3], "c": "text"}' for n in range(16)}
    described = {f"{n:04}": {**parts, "number": str(n)} for n in range(600)}
    names = list(described)
    started = time.thread_time()
    assert len(most_alike(described, names[:300], names[300:])) == 300
    assert time.thread_time() - started < 10.0


def test_the_namespaces_of_one_client_do_not_hold_the_page() -> None:
    """5 s of processor time for 4,000 of them, and the square of it for more, where all pairs were
    compared; 20 s for 576 large ones."""
    members = json.dumps({f"{n}": 0 for n in range(4_000)})
    described = {f"{n:06}": {"a": members if n % 50 == 0 else "b"} for n in range(20_000)}
    names = list(described)
    started = time.thread_time()
    found = most_alike(described, names[::2], names[1::2])
    assert time.thread_time() - started < 10.0
    assert 256 <= len(found) < 1_000
    assert names[0] in found


def test_a_description_is_not_multiplied_by_the_names_in_it() -> None:
    """64 KB were 123 MiB, and the answer 646 MB: each member had the 32 K of the names above it."""
    members: object = dict.fromkeys(map(str, range(200)), 0)
    for depth in range(7):
        members = {f"{depth}" * 2_000: members}
    ours, theirs = (
        {"a": json.dumps(members)},
        {"a": json.dumps({"x" * 12_000: {"b": "1", "c": "2"}})},
    )
    found = differences(ours, theirs)
    assert sum(len(name) + len(str(values)) for name, values in found.items()) < 40_000
    assert found["a." + "x" * 12_000][0] is None
    assert differences({"a": "y" * 60_000}, {"a": "z"}) == {"a": ("y" * 1023 + "…", "z")}
    deep = "{" * 5_000
    assert differences({"a": '{"b": ' + "[" * 900 + "]" * 900 + "}"}, {"a": deep})


def test_of_parts_without_number_the_first_ones_count() -> None:
    """Redis may have any number of them: 524,288 took 8 s."""
    parts = {str(number): "x" for number in range(100_000)}
    assert len(differences(parts, {"a": "b"})) == 257
