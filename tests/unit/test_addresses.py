"""What `doctor` makes of the outcome of nodes that dial each other, and who dials whom."""

import pytest

from lookup_buffer.cli.check import Check, Verdict
from lookup_buffer.cli.check_addresses import (
    ALL_PAIRS_NODES_MAX,
    DIALLERS,
    NODES_MAX,
    Pair,
    Result,
    findings,
    pairs_of,
)
from lookup_buffer.protocol.messages import Reached
from store import NodeInfo

YES = Result(Reached.YES)


def node(name: str, *, host: str = "", endpoint: str = "") -> NodeInfo:
    endpoint = endpoint or f"tcp://10.0.0.{ord(name[0]) - 96}:7730"
    return NodeInfo(name, f"boot{name}", endpoint, host or f"host-{name}", "0.1", 1, 1, 1)


def found(infos: list[NodeInfo], **results: Result) -> list[Check]:
    """`results` by dialler and node, as in `a_b`."""
    pairs = {Pair(*names.split("_")): result for names, result in results.items()}
    return list(findings(infos, pairs))


def test_all_are_reached() -> None:
    (check,) = found([node("a"), node("b")], a_b=YES, b_a=YES)
    assert check.verdict is Verdict.OK
    assert "2 of 2" in check.found
    assert "64.0 KiB each way" in check.found


def test_a_single_node_has_no_one_to_dial_it() -> None:
    (check,) = found([node("a", endpoint="tcp://127.0.0.1:7730")])
    assert check.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("outcome", "what", "advice"),
    [
        (Reached.REFUSED, "nothing listens there", "set `advertise` of b"),
        (Reached.NO_ROUTE, "no route", "set `advertise` of b"),
        (Reached.NO_ADDRESS, "cannot be resolved", "set `advertise` of b"),
        (Reached.TIMED_OUT, "no answer there in time", "open that port"),
        (Reached.BROKEN, "the connection ended", "set `advertise` of b"),
        (Reached.STRANGER, "no node listens there", "set `advertise` of b"),
        (Reached.OTHER, "another node answers there", "one token"),
        (Reached.STUCK_THERE, "frames of 64.0 KiB do not arrive there", "ip link set dev"),
        (Reached.STUCK_BACK, "its frames of 64.0 KiB do not arrive", "ip link set dev"),
    ],
)
def test_each_failure_names_node_address_dialler_and_what_to_do(
    outcome: Reached, what: str, advice: str
) -> None:
    nodes = [node("a"), node("b"), node("c")]
    failed, works = found(nodes, a_b=Result(outcome, "so it said"), c_b=YES, b_a=YES)
    assert failed.name == "address"
    assert failed.verdict is Verdict.FAIL
    assert failed.found.startswith("b at tcp://10.0.0.2:7730: ")
    assert what in failed.found
    assert failed.found.endswith("(so it said), dialled by a; reached by c")
    assert advice in failed.advice
    assert works.verdict is Verdict.OK


def test_every_outcome_has_a_meaning() -> None:
    for outcome in Reached:
        checks = found([node("a"), node("b")], a_b=Result(outcome, "x"))
        assert {check.verdict for check in checks} != set()


def test_one_finding_of_a_node_with_several_failures() -> None:
    nodes = [node(name) for name in "abcd"]
    refused, late = Result(Reached.REFUSED), Result(Reached.TIMED_OUT)
    (check,) = found(nodes, a_b=refused, c_b=refused, d_b=late)
    assert check.found.endswith(
        "nothing listens there, dialled by a, c; no answer there in time, dialled by d"
    )


def test_two_nodes_that_do_not_reach_each_other() -> None:
    """Neither can be asked by the other to dial it."""
    nodes = [node(name) for name in "abc"]
    cut = {
        "b_c": Result(Reached.CUT, "b at B cannot be asked: x"),
        "c_b": Result(Reached.CUT, "c at C cannot be asked: x"),
    }
    of_b, of_c, works = found(nodes, a_b=YES, a_c=YES, b_a=YES, c_a=YES, **cut)
    assert of_b.verdict is of_c.verdict is Verdict.FAIL
    assert of_b.found == (
        "b at tcp://10.0.0.2:7730: it does not reach the node that was to dial it (c at C cannot "
        "be asked: x), not dialled by c; reached by a"
    )
    assert "open the ports of b and c" in of_b.advice
    assert "`advertise`" not in of_b.advice
    assert works.verdict is Verdict.OK


def test_a_loopback_address_is_wrong_beside_other_hosts_only() -> None:
    here = node("a", host="h1", endpoint="tcp://127.0.0.1:1")
    same = node("b", host="h1", endpoint="tcp://localhost:2")
    assert [check.verdict for check in found([here, same], a_b=YES, b_a=YES)] == [Verdict.OK]
    first, second, *rest = found([here, same, node("c", host="h2")], a_b=YES, b_a=YES, a_c=YES)
    for check, name in ((first, "a at tcp://127.0.0.1:1"), (second, "b at tcp://localhost:2")):
        assert check.verdict is Verdict.FAIL
        assert check.found.startswith(f"{name}: a loopback address, but nodes run on other hosts")
        assert "`advertise`" in check.advice
    assert [check.verdict for check in rest] == [Verdict.OK]


def test_a_loopback_address_that_another_host_reaches_is_right() -> None:
    """As in two containers that share a network."""
    here = node("a", host="h1", endpoint="tcp://[::1]:1")
    checks = found([here, node("b", host="h2")], b_a=YES)
    assert [check.verdict for check in checks] == [Verdict.OK]


def test_what_was_not_checked_is_no_failure() -> None:
    old = Result(Reached.OLD, "b speaks protocol 4")
    (check,) = found([node("a"), node("b")], a_b=old, b_a=old)
    assert check.verdict is Verdict.WARN
    assert check.found == "not checked, of 2 connections: 2: b speaks protocol 4"
    assert "upgrade" in check.advice
    works, left = found([node("a"), node("b")], a_b=YES, b_a=Result(Reached.BUSY, "b is busy"))
    assert works.verdict is Verdict.OK
    assert left.verdict is Verdict.WARN
    assert "again" in left.advice


def test_all_pairs_of_a_small_fleet() -> None:
    names = [f"n{number}" for number in range(ALL_PAIRS_NODES_MAX)]
    first, second = pairs_of("n3", names)
    assert {pair.dialler for pair in first} == {"n3"}
    assert sorted(first + second) == sorted(Pair(a, b) for a in names for b in names if a != b)
    assert pairs_of("n0", ["n0"]) == ([], [])


def test_a_sample_of_a_large_fleet() -> None:
    names = [f"n{number}" for number in range(1000)]
    first, second = pairs_of("n3", names)
    assert len(first) == NODES_MAX - 1
    assert len(first) + len(second) == (NODES_MAX - 1) * (2 + DIALLERS)
    assert len({*first, *second}) == len(first) + len(second)
    assert all(pair.dialler != pair.node for pair in first + second)
