"""Namespaces: equal parts, equal fingerprint; any difference, another one."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookup_buffer.errors import ConfigError
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.fields import is_fingerprint
from lookup_buffer.protocol.messages import Describe, parse

parts = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.text(st.characters(codec="utf-8"), max_size=20),
    max_size=5,
)


@given(parts, parts)
def test_fingerprints_are_equal_exactly_where_the_parts_are(
    one: dict[str, str], other: dict[str, str]
) -> None:
    first, second = Namespace(one), Namespace(other)
    assert is_fingerprint(first.fingerprint)
    assert (first.fingerprint == second.fingerprint) == (one == other)
    assert (first == second) == (one == other)
    assert hash(Namespace(dict(reversed(one.items())))) == hash(first)
    assert Namespace(dict(reversed(one.items()))) == first


@given(parts)
def test_every_namespace_can_be_described_to_a_node(one: dict[str, str]) -> None:
    namespace = Namespace(one)
    request = Describe(1, namespace.fingerprint, dict(namespace.parts))
    assert parse(request.to_wire()) == request


def test_names_and_values_cannot_run_into_each_other() -> None:
    texts = [{"a": "b"}, {"ab": ""}, {"a": "b", "c": ""}, {"a": 'b","c":"'}, {'a":"b': ""}]
    assert len({Namespace(text).fingerprint for text in texts}) == len(texts)


@pytest.mark.processes
def test_it_is_the_same_in_every_process() -> None:
    program = (
        "from lookup_buffer.namespace import Namespace;"
        "print(Namespace({'b': 'ü', 'a': '1'}).fingerprint)"
    )
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    assert found.stdout.strip() == Namespace({"a": "1", "b": "ü"}).fingerprint
    # Written down: a change of the algorithm parts old nodes from new ones.
    assert Namespace.named("photos").fingerprint == (
        "29b98afdcd99c1dca65b9097dd6af3e1af5035e208b358ddb17a61c114e62e9a"
    )


def test_the_parts_belong_to_the_namespace() -> None:
    given_parts = {"a": "1"}
    namespace = Namespace(given_parts)
    given_parts["a"] = "2"
    assert namespace == Namespace({"a": "1"})


@pytest.mark.parametrize(
    "wrong", [{"a": 1}, {"": "x"}, {1: "x"}, {"a": None}, {str(n): "" for n in range(257)}]
)
def test_an_invalid_namespace_is_refused_when_it_is_made(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Namespace(wrong)
