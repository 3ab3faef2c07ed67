"""The history of a key in all namespaces; and samples of the fleet, for rates.

`history_of` collects all that the store holds of one key, for `why` and the dashboard.
`take_sample` reads heartbeats, node descriptions, counters and the hottest keys at one moment.
`Activity` is what was counted between two samples, for `top` and the dashboard.

Reads the store only and connects to no node. It must not depend on how results are shown.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from lookup_buffer.inspection.access import CommandError, ExitCode, traces_of
from lookup_buffer.inspection.findings import (
    Code,
    Finding,
    Fleet,
    absent,
    difference_text,
    differences,
    findings_of,
    most_alike,
    no_namespace,
)
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey
from lookup_buffer.protocol.fields import is_fingerprint
from store import Beat, BrowsableStore, NodeInfo
from store.record import SAFE_NAME

if TYPE_CHECKING:
    from store.answers import Trace
    from store.base import Traces

Address = tuple[str, str]
"""(namespace, key)."""
NAMED_WHEN_AMBIGUOUS = 5
FOUND_MAX = 10_000
HOTTEST = 20
OTHERS_MAX = 5
OTHERS_NAMED_MAX = 50
"""Most namespaces without the key that are reported, if the caller named none or the beginning of
some: those most similar to one that has the key."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one key in all namespaces."""

    key: str
    namespace: str
    """The prefix of the requested namespaces; "" is all."""
    described: Mapping[str, Mapping[str, str]]
    traces: Mapping[str, "Trace"]
    fleet: Fleet

    def findings(self) -> Iterator[Finding]:
        requested = {space for space in self.traces if space.startswith(self.namespace)}
        has_it = [space for space in self.traces if self._is_stored(space)]
        found = [
            one
            for space in sorted(requested)
            for one in findings_of(self.traces[space], self.fleet)
        ]
        yield from found
        known = {space for space in self.described if space.startswith(self.namespace)}
        if not requested and not known and self.namespace:
            yield no_namespace(self.key, self.namespace, sorted(self.described))
        elif not found and not (self.namespace and has_it):
            where = " in the namespace" if self.namespace else ""
            one = next(iter(known)) if len(known) == 1 and self.namespace else None
            yield absent(self.key, one, where)
        if has_it:
            beside = most_alike(self.described, (known | requested) - set(has_it), has_it)
            most = OTHERS_NAMED_MAX if self.namespace else OTHERS_MAX
            for space, other in islice(beside.items(), most):
                yield self._stored_in_another(space, other)

    def _is_stored(self, space: str) -> bool:
        found = findings_of(self.traces[space], self.fleet)
        return any(one.code is Code.STORED for one in found)

    def _stored_in_another(self, space: str, other: str) -> Finding:
        """The finding that `other` has the key and `space` has not."""
        ours, theirs = self.described.get(space, {}), self.described.get(other, {})
        differs = differences(ours, theirs) if ours and theirs else {}
        if differs:
            what = f"they differ in {difference_text(differs)}"
        elif ours and theirs:
            what = "their settings are equal, but written differently"
        else:
            what = "one of the two is not described"
        return Finding(
            Code.OTHER_NAMESPACE, space, self.key,
            f"not in namespace {space[:8]}, but present under namespace {other[:8]}; {what}",
            "engines share what is computed alike: give both the same settings, if they are "
            "meant to share",
            other_namespace=other, differs=differs,
        )  # fmt: skip


async def history_of(store: BrowsableStore, key: str, namespace: str) -> History:
    """What is known of `key`, or of the only key that contains it, in all namespaces.

    `namespace`: the prefix of the requested namespaces; "" is all.

    Raises:
        CommandError: several keys contain it.
        InvalidKey: no key contains it, and no valid key can.
        StoreError: the store cannot be reached or refuses the request.
    """
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        TensorKey.parse(key)  # raises, with the reason
    monitor = await HeartbeatMonitor.begin(store)
    all_parts = await store.namespaces()
    described = {name: parts for name, parts in all_parts.items() if SAFE_NAME.match(name)}
    reader = traces_of(store)
    spaces = sorted({*described, *([namespace] if is_fingerprint(namespace) else [])})
    traces = [trace for trace in await reader.of([(s, key) for s in spaces]) if not trace.is_empty]
    if not traces:
        traces = await _search(reader, key, namespace)
    nodes = {at.node for trace in traces if trace.record for at in trace.record.locations}
    await monitor.wait(nodes)
    fleet = Fleet(monitor, await reader.departures(sorted(nodes)))
    by_space = {trace.namespace: trace for trace in traces}
    return History(traces[0].key if traces else key, namespace, described, by_space, fleet)


async def _search(reader: "Traces", part: str, namespace: str) -> list["Trace"]:
    """All traces of the one key that contains `part`.

    A key in the requested namespaces goes before keys in other namespaces.

    Raises:
        CommandError: several keys contain `part`.
        InvalidKey: no key contains `part`, and no valid key can.
    """
    found: set[tuple[str, str]] = set()
    async for address in reader.find(part):
        found.add(address)
        if len(found) >= FOUND_MAX:
            break
    near = {key for space, key in found if space.startswith(namespace)}
    keys = sorted(near or {key for _, key in found})
    if part in keys:
        keys = [part]
    if len(keys) > 1:
        named = ", ".join(keys[:NAMED_WHEN_AMBIGUOUS])
        more = ", …" if len(keys) > NAMED_WHEN_AMBIGUOUS else ""
        raise CommandError(f"{len(keys)} keys contain {part!r}: {named}{more}", ExitCode.USAGE)
    if not keys:
        TensorKey.parse(part)  # raises if no valid key can contain it
    traces = await reader.of(sorted(address for address in found if address[1] in keys))
    return [trace for trace in traces if not trace.is_empty]


@dataclass(frozen=True, slots=True)
class Sample:
    """All that was read at one moment: `at`, in seconds of the monotonic clock."""

    at: float
    beats: Mapping[str, Beat]
    infos: Mapping[str, NodeInfo]
    counters: Mapping[str, Mapping[str, int]]
    hits: Mapping[Address, int]


@dataclass(frozen=True, slots=True)
class Activity:
    """What happened between a sample and a later one."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return max(self.last.at - self.first.at, 1e-3)

    def alive(self, node: str) -> bool:
        """Whether the heartbeat of `node` changed between the samples."""
        return self.last.beats.get(node) != self.first.beats.get(node)

    def of_node(self, node: str) -> Counter[str]:
        """What a node counted between the samples.

        A counter below its earlier value was reset by a restart: its whole value counts.
        """
        before, now = self.first.counters.get(node, {}), self.last.counters.get(node, {})
        return Counter(
            {
                name: count - before.get(name, 0) if count >= before.get(name, 0) else count
                for name, count in now.items()
            }
        )

    def of_all(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for node in self.last.counters:
            total.update(self.of_node(node))
        return total

    def hottest(self) -> list[tuple[Address, int, int]]:
        """The HOTTEST keys: (address, hits between the samples, hits in all).

        Those with the most hits between the samples come first.
        """
        found = [
            (address, max(0, hits - self.first.hits.get(address, hits)), hits)
            for address, hits in self.last.hits.items()
        ]
        return sorted(found, key=lambda one: (-one[1], -one[2], one[0]))[:HOTTEST]


async def take_sample(store: BrowsableStore, namespaces: list[str], now: float) -> Sample:
    """Read a sample; `now` is the monotonic clock in seconds.

    Hits are those of the HOTTEST keys in `namespaces`.

    Raises:
        StoreError: the store cannot be reached or refuses the request.
    """
    beats = await store.beats()
    hottest = await traces_of(store).hottest(namespaces, HOTTEST)
    return Sample(
        now, beats, await store.node_infos(sorted(beats)), await store.stats(),
        # A name written by hand may be longer than any key, too long to show.
        {at: hits for at, hits in hottest.items() if len(at[1]) <= MAX_KEY_CHARACTERS},
    )  # fmt: skip
