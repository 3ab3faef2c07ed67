"""Checks of the addresses that nodes advertise: nodes dial each other there, for large frames too.

The node of this host has it done, see `lookup_buffer.node.reachability`: this host's addresses and
routes may differ from those of other hosts. Called by `check_fleet`.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lookup_buffer.cli.check import Check, fail, named, ok, warn
from lookup_buffer.errors import ConfigError, LookupBufferError
from lookup_buffer.inspection.access import is_listening
from lookup_buffer.inspection.heartbeats import progress_shown
from lookup_buffer.inspection.records import size_text
from lookup_buffer.protocol.fields import EXCHANGED_BYTES
from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Reach, Reached
from store import NodeInfo

if TYPE_CHECKING:
    from lookup_buffer.client.session import NodeConnection
    from lookup_buffer.config import BufferConfig

SECONDS_MAX: Final = 30.0
"""For all connections together; those that have not been made by then are not checked."""
QUIET_SECONDS: Final = 2.0
SECOND_LOOK_SECONDS: Final = 3.0
"""After that, what failed is tried once more: the node may just restart."""
AT_ONCE_MAX: Final = 8
ALL_PAIRS_NODES_MAX: Final = 8
"""In a larger fleet a node is dialled by the one of this host and by DIALLERS others."""
DIALLERS: Final = 2
NODES_MAX: Final = 64
"""Of a larger fleet so many are checked, chosen at random."""
LOOPBACK: Final = ("127.", "localhost", "::1")
_LARGE: Final = size_text(EXCHANGED_BYTES)
_UNCHECKED: Final = frozenset([Reached.OLD, Reached.UNKNOWN, Reached.UNASKED, Reached.BUSY])
_STUCK: Final = frozenset([Reached.STUCK_THERE, Reached.STUCK_BACK])
_MEANINGS: Final[Mapping[Reached, str]] = {
    Reached.REFUSED: "nothing listens there",
    Reached.NO_ROUTE: "there is no route to it",
    Reached.NO_ADDRESS: "it cannot be resolved",
    Reached.TIMED_OUT: "no answer there in time",
    Reached.BROKEN: "the connection ended",
    Reached.STRANGER: "no node listens there",
    Reached.OTHER: "another node answers there, or one that refuses",
    Reached.STUCK_THERE: f"it answers, but frames of {_LARGE} do not arrive there",
    Reached.STUCK_BACK: f"it answers, but its frames of {_LARGE} do not arrive",
    Reached.CUT: "it does not reach the node that was to dial it",
}
_MTU_ADVICE: Final = (
    "an MTU on the way is smaller than that of the hosts, and what reports it is dropped: set the "
    "smaller one on both hosts (`ip link set dev eth0 mtu 1400`), or let ICMP pass "
    "(fragmentation needed, packet too big)"
)


class Pair(NamedTuple):
    dialler: str
    node: str


class Result(NamedTuple):
    outcome: Reached
    detail: str = ""


def address_checks(config: "BufferConfig", infos: Sequence[NodeInfo]) -> Iterator[Check]:
    """Checks of the addresses of `infos`, the live nodes. Without a node of this fleet on this host
    none is dialled. Takes SECONDS_MAX at most."""
    results: dict[Pair, Result] = {}
    try:
        path = config.socket_path()
        if is_listening(path):
            results = _dialled(path, [info.node for info in infos], config.node_uid)
    except (ConfigError, OSError):
        pass  # the directory cannot be used, which the checks of this host report
    except LookupBufferError as error:
        yield warn(
            "addresses",
            f"not dialled: {error}",
            "restart the node of this host: it hangs, or is of an older version",
        )
    yield from findings(infos, results)


# -- what is dialled


def pairs_of(here: str, nodes: Sequence[str]) -> tuple[list[Pair], list[Pair]]:
    """Who dials whom: first the connections from node `here`, then the others. All pairs of a small
    fleet. In a larger one each node of a sample is dialled by `here` and by DIALLERS others."""
    others = [node for node in sorted(nodes) if node != here]
    is_small = len(others) < ALL_PAIRS_NODES_MAX
    if not is_small:
        others = random.sample(others, min(len(others), NODES_MAX - 1))
    shifts = len(others) if is_small else DIALLERS + 1
    between = [
        Pair(node, others[(number + shift) % len(others)])
        for shift in range(1, shifts)  # so that those at once have different ends
        for number, node in enumerate(others)
    ]
    return [Pair(here, node) for node in others], [Pair(node, here) for node in others] + between


def _dialled(path: Path, nodes: Sequence[str], node_uid: int | None) -> dict[Pair, Result]:
    """What the node at `path` finds out about `nodes`; empty if it is not one of them.

    Raises:
        LookupBufferError: it does not answer.
    """
    from lookup_buffer.client.session import NodeConnection, next_request_id

    deadline = time.monotonic() + SECONDS_MAX
    connection = NodeConnection(path, QUIET_SECONDS, node_uid=node_uid)
    try:
        hello = Hello(next_request_id(), VERSION, None, {})
        connection.send(hello, deadline=time.monotonic() + QUIET_SECONDS)
        welcome, descriptors = connection.receive_with_descriptors(time.monotonic() + QUIET_SECONDS)
        for descriptor in descriptors:  # of the node's memory, unused here
            os.close(descriptor)
        here = str(welcome["node"])
        if here not in nodes:
            return {}
        calls = _Calls(connection, deadline)
        first, second = pairs_of(here, nodes)
        calls.make(first)
        cut_off = {
            pair.node
            for pair in first
            if calls.results[pair].outcome not in (Reached.YES, Reached.OLD, *_STUCK)
        }
        calls.make([pair for pair in second if not cut_off.intersection(pair)])
        connection.send_now(Goodbye(next_request_id()))
    finally:
        connection.close()
    return calls.results


def _pause() -> None:
    with progress_shown("some nodes are not reached, and will be dialled again …"):
        time.sleep(SECOND_LOOK_SECONDS)


class _Calls:
    """Calls of this host's node, several at a time."""

    def __init__(self, connection: "NodeConnection", deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self.results: dict[Pair, Result] = {}

    def make(self, pairs: Sequence[Pair]) -> None:
        """And once more those that fail, after a pause.

        Raises:
            LookupBufferError: the node ended, or does not know this request.
        """
        self._make(pairs)
        if failed := [pair for pair in pairs if _fails(self.results[pair])]:
            _pause()
            self._make(failed)

    def _make(self, pairs: Sequence[Pair]) -> None:
        from lookup_buffer.client.session import next_request_id

        left, asked = list(pairs), dict[int, Pair]()
        while (left or asked) and time.monotonic() < self._deadline:
            while left and len(asked) < AT_ONCE_MAX:
                number, pair = next_request_id(), left.pop(0)
                self._connection.send(Reach(number, *pair), deadline=self._deadline)
                asked[number] = pair
            if self._is_readable(len(pairs) - len(left) - len(asked), len(pairs)):
                for message in self._connection.receive(self._deadline):
                    if message["id"] in asked:
                        self.results[asked.pop(message["id"])] = _result(message)
        late = Result(Reached.UNASKED, f"no time left after {SECONDS_MAX:.0f} s")
        for pair in [*asked.values(), *left]:
            self.results.setdefault(pair, late)

    def _is_readable(self, done: int, of: int) -> bool:
        now = time.monotonic()
        if now < self._quiet_until:
            return self._connection.readable_within(min(self._quiet_until, self._deadline) - now)
        with progress_shown(f"nodes dial each other: {done} of {of} …"):
            return self._connection.readable_within(max(0.0, self._deadline - now))


def _result(message: Mapping[str, Any]) -> Result:
    if "error" in message:
        return Result(Reached.UNASKED, str(message.get("message")))
    return Result(Reached(message["outcome"]), str(message["detail"]))


# -- what it means


def _fails(result: Result) -> bool:
    return result.outcome is not Reached.YES and result.outcome not in _UNCHECKED


def findings(infos: Sequence[NodeInfo], results: Mapping[Pair, Result]) -> Iterator[Check]:
    """The checks that `results` are: a failed one for each node that is not reached, or cannot be;
    what works; what was not checked. Pure."""
    hosts = {info.node: info.host for info in infos}
    for info in sorted(infos, key=lambda info: info.node):
        of_node = {pair.dialler: each for pair, each in results.items() if pair.node == info.node}
        yield from _node_findings(info, of_node, hosts)
    works = [pair for pair, result in results.items() if result.outcome is Reached.YES]
    if works:
        nodes = len({pair.node for pair in works})
        found = f"nodes reached by others, with {_LARGE} each way: {nodes} of {len(infos)}"
        yield ok("addresses", f"{found} (connections: {len(works)})")
    elif len(infos) == 1:
        yield ok("addresses", "no other node is alive to dial this one")
    yield from _unchecked(results)


def _node_findings(
    info: NodeInfo, results: Mapping[str, Result], hosts: Mapping[str, str]
) -> Iterator[Check]:
    who = f"{info.node} at {info.endpoint}"
    failed = {dialler: result for dialler, result in results.items() if _fails(result)}
    reached = [dialler for dialler, result in results.items() if result.outcome is Reached.YES]
    elsewhere = sorted({host for host in hosts.values() if host != info.host})
    is_loopback = info.endpoint.partition("://")[2].lstrip("[").startswith(LOOPBACK)
    if is_loopback and elsewhere and not any(hosts[one] in elsewhere for one in reached):
        yield fail(
            "address",
            f"{who}: a loopback address, but nodes run on other hosts: {named(elsewhere)}",
            f"set `advertise` of {info.node} to an address of its host that these reach, and "
            "`listen` to one that takes them: what it holds cannot be fetched",
        )
    elif failed:
        also = f"; reached by {named(reached)}" if reached else ""
        yield fail("address", f"{who}: {_what_failed(failed)}{also}", _advice(info, failed))


def _what_failed(failed: Mapping[str, Result]) -> str:
    by_meaning: dict[str, list[str]] = {}
    for dialler, (outcome, detail) in sorted(failed.items()):
        meaning = _MEANINGS[outcome] + (f" ({detail})" if detail else "")
        meaning += ", not dialled by" if outcome is Reached.CUT else ", dialled by"
        by_meaning.setdefault(meaning, []).append(dialler)
    return "; ".join(f"{what} {named(who)}" for what, who in by_meaning.items())


def _advice(info: NodeInfo, failed: Mapping[str, Result]) -> str:
    outcomes = {result.outcome for result in failed.values()}
    advice = []
    if outcomes & _STUCK:
        advice.append(_MTU_ADVICE)
    if Reached.OTHER in outcomes:
        advice.append(
            f"set `advertise` of {info.node} to its own address and port, or give all nodes one "
            "token, version and authority, all with or all without TLS"
        )
    if Reached.CUT in outcomes:
        diallers = [one for one, result in failed.items() if result.outcome is Reached.CUT]
        advice.append(
            f"open the ports of {info.node} and {named(diallers)} between their hosts; both ways "
            "are needed"
        )
    if outcomes - _STUCK - {Reached.OTHER, Reached.CUT}:
        advice.append(
            f"set `advertise` of {info.node} to the address and port at which other hosts reach "
            "it, or open that port between the hosts"
        )
    return "; ".join(advice) + ": what it holds cannot be fetched"


def _unchecked(results: Mapping[Pair, Result]) -> Iterator[Check]:
    left = [result for result in results.values() if result.outcome in _UNCHECKED]
    if not left:
        return
    is_old = all(result.outcome is Reached.OLD for result in left)
    why = sorted({result.detail for result in left})
    yield warn(
        "addresses",
        f"not checked, of {len(results)} connections: {len(left)}: {named(why)}",
        "upgrade these nodes to have them checked"
        if is_old
        else "run `lookup-buffer doctor` again, or on these hosts",
    )
