"""Timeouts that callers give: any number of seconds, also an infinite one, and nothing else."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import ClaimHandle, PrefetchState
from lookup_buffer.client.session import NodeConnection
from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, StartNode, at_rest, handoff, key

Use = Callable[[LookupBuffer, float], object]
ONE = torch.ones(3)
LISTED, FOR_AN_HOUR, HANDOFF = key(), key(), handoff()
KEYS = [LISTED, FOR_AN_HOUR]


def view(buffer: LookupBuffer, timeout: float) -> None:
    with buffer.view(LISTED, timeout=timeout):
        pass


def prefetch(buffer: LookupBuffer, timeout: float) -> None:
    handles = buffer.prefetch(KEYS, timeout=timeout)
    assert [handle.state for handle in handles] == [PrefetchState.RESIDENT] * 2


def prefetch_and_claim(buffer: LookupBuffer, timeout: float) -> None:
    handles, _ = buffer.prefetch_and_claim(KEYS, wait_seconds=timeout, timeout=timeout)
    assert [handle.state for handle in handles] == [PrefetchState.RESIDENT] * 2


def claim_all(buffer: LookupBuffer, timeout: float) -> None:
    claims = buffer.claim_all([key()], wait_seconds=timeout, timeout=timeout)
    assert claims.state is ClaimOutcome.GRANTED


USES: dict[str, Use] = {
    "insert": lambda buffer, timeout: buffer.insert(key(), ONE, timeout=timeout),
    "insert a hand-off": lambda buffer, timeout: buffer.insert(handoff(), ONE, timeout=timeout),
    "insert_many": lambda buffer, timeout: buffer.insert_many([(key(), ONE)], timeout=timeout),
    "select": lambda buffer, timeout: buffer.select(LISTED, timeout=timeout),
    "select of the node": lambda buffer, timeout: buffer.select(FOR_AN_HOUR, timeout=timeout),
    "select_many": lambda buffer, timeout: buffer.select_many(KEYS, timeout=timeout),
    "drop_select": lambda buffer, timeout: buffer.drop_select(HANDOFF, timeout=timeout),
    "view": view,
    "has_caches": lambda buffer, timeout: buffer.has_caches([*KEYS, key()], timeout=timeout),
    "prefetch": prefetch,
    "prefetch_and_claim": prefetch_and_claim,
    "claim": lambda buffer, timeout: buffer.claim(key(), lease_seconds=5.0, timeout=timeout),
    "claim_all": claim_all,
}


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    return module_nodes()


@pytest.fixture
def buffer(node: NodeProcess) -> Iterator[LookupBuffer]:
    with node.client() as buffer:
        buffer.insert(LISTED, ONE)
        buffer.insert(FOR_AN_HOUR, ONE, ttl_seconds=3600.0)  # no index lists it
        buffer.insert(HANDOFF, ONE)
        yield buffer
    at_rest(node)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e10])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_timeout_may_be_infinite(buffer: LookupBuffer, use: Use, timeout: float) -> None:
    use(buffer, timeout)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_timeout_that_is_no_number_is_refused_before_anything_is_sent(
    buffer: LookupBuffer, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: Any, **__: Any) -> None:
        raise AssertionError("it sends something")

    with monkeypatch.context() as patches:
        for name in ("send", "send_now"):
            patches.setattr(NodeConnection, name, send)
        with pytest.raises(ConfigError):
            use(buffer, math.nan)


def test_the_wait_of_a_handle_may_be_infinite(buffer: LookupBuffer) -> None:
    (handle,) = buffer.prefetch([LISTED])
    assert handle.wait(math.inf) is PrefetchState.RESIDENT
    claims: ClaimHandle = buffer.claim_all([key()], wait_seconds=1.0)
    claims.wait_for_answer(math.inf)
    assert claims.wait(math.inf) is ClaimOutcome.GRANTED
    for wait in (handle.wait, claims.wait, claims.wait_for_answer):
        with pytest.raises(ConfigError):
            wait(math.nan)


def test_claims_of_no_keys_are_granted(buffer: LookupBuffer) -> None:
    assert buffer.claim_all([], wait_seconds=1.0).state is ClaimOutcome.GRANTED
    handles, claims = buffer.prefetch_and_claim([], wait_seconds=1.0, timeout=1.0)
    assert handles == []
    assert claims.state is ClaimOutcome.GRANTED
    buffer.unclaim([], claims)
