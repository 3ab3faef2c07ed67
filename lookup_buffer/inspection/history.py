"""The history of a key: all that the store knows of it, gathered from every namespace.

Works against the store alone; no node is asked.

What `top` shows: the fleet at one moment, and what was counted since the moment before.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

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
from lookup_buffer.inspection.records import BeatWatch, CommandError, ExitCode, traces_of
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey
from lookup_buffer.protocol.messages import is_fingerprint
from store import Beat, MetadataStore, NodeInfo
from store.record import SAFE_NAME

if TYPE_CHECKING:
    from store.trace import Trace, Traces


NAMED_WHEN_AMBIGUOUS = 5
FOUND_MAX = 10_000
OTHERS_MAX = 5
"""Namespaces without the key that are told of where none was named: those most like one with it."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one key everywhere."""

    key: str
    namespace: str
    """How the namespaces begin that were asked about."""
    described: Mapping[str, Mapping[str, str]]
    traces: Mapping[str, "Trace"]
    fleet: Fleet

    def findings(self) -> Iterator[Finding]:
        asked = {space for space in self.traces if space.startswith(self.namespace)}
        has_it = [space for space in self.traces if self._is_stored(space)]
        found = [
            one for space in sorted(asked) for one in findings_of(self.traces[space], self.fleet)
        ]
        yield from found
        known = {space for space in self.described if space.startswith(self.namespace)}
        if not asked and not known and self.namespace:
            yield no_namespace(self.key, self.namespace, sorted(self.described))
        elif not found and not (self.namespace and has_it):
            where = " in the namespace" if self.namespace else ""
            one = next(iter(known)) if len(known) == 1 and self.namespace else None
            yield absent(self.key, one, where)
        if has_it:
            beside = most_alike(self.described, (known | asked) - set(has_it), has_it)
            for space, other in islice(beside.items(), None if self.namespace else OTHERS_MAX):
                yield self._elsewhere(space, other)

    def _is_stored(self, space: str) -> bool:
        found = findings_of(self.traces[space], self.fleet)
        return any(one.code is Code.STORED for one in found)

    def _elsewhere(self, space: str, other: str) -> Finding:
        """`space` beside one that has it."""
        ours, theirs = self.described.get(space, {}), self.described.get(other, {})
        differs = differences(ours, theirs) if ours and theirs else {}
        if differs:
            what = f"they differ in {difference_text(differs)}"
        elif ours and theirs:
            what = "what they stand for is the same, written differently"
        else:
            what = "nobody says what one of the two stands for"
        return Finding(
            Code.OTHER_NAMESPACE, space, self.key,
            f"not in namespace {space[:8]}, but present under namespace {other[:8]}; {what}",
            "engines share what is computed alike: give both the same settings, if they are "
            "meant to share",
            other_namespace=other, differs=differs,
        )  # fmt: skip


def history_of(store: MetadataStore, key: str, namespace: str) -> History:
    """What is known of `key`, or of the one key that has it in it, wherever it is.

    `namespace`: how the namespaces begin that are asked about; "" is all.

    Raises:
        CommandError: several keys have it in them.
        InvalidKey: it is part of no key, and can be part of none.
        StoreError: the store does not answer.
    """
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        TensorKey.parse(key)  # says what is wrong
    watch = BeatWatch(store)
    described = {name: parts for name, parts in store.namespaces().items() if SAFE_NAME.match(name)}
    reader = traces_of(store)
    spaces = sorted({*described, *([namespace] if is_fingerprint(namespace) else [])})
    traces = [trace for trace in reader.of([(s, key) for s in spaces]) if not trace.is_empty]
    if not traces:
        traces = _search(reader, key, namespace)
    nodes = {at.node for trace in traces if trace.record for at in trace.record.locations}
    watch.settle(nodes)
    fleet = Fleet(watch, reader.departures(sorted(nodes)))
    by_space = {trace.namespace: trace for trace in traces}
    return History(traces[0].key if traces else key, namespace, described, by_space, fleet)


def _search(reader: "Traces", part: str, namespace: str) -> list["Trace"]:
    """The traces of the one key that has `part` in it: in the namespaces that are asked about, or
    else in whatever namespace; then all that is known of that key."""
    found: set[tuple[str, str]] = set()
    for address in reader.find(part):
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
        raise CommandError(f"{len(keys)} keys have {part!r} in them: {named}{more}", ExitCode.USAGE)
    if not keys:
        TensorKey.parse(part)  # nobody can have such a key: say so
    return [t for t in reader.of(sorted(a for a in found if a[1] in keys)) if not t.is_empty]


HOTTEST = 20
Address = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """All that is read at one moment, `at` by the monotonic clock."""

    at: float
    beats: Mapping[str, Beat]
    infos: Mapping[str, NodeInfo]
    counters: Mapping[str, Mapping[str, int]]
    hits: Mapping[Address, int]


@dataclass(frozen=True, slots=True)
class Activity:
    """What happened from one sample to a later one."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return max(self.last.at - self.first.at, 1e-3)

    def alive(self, node: str) -> bool:
        """Whether its beat has moved."""
        return self.last.beats.get(node) != self.first.beats.get(node)

    def of_node(self, node: str) -> Counter[str]:
        """What a node has counted. One that began anew has counted all that it says."""
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
        """Keys with their hits meanwhile and altogether, those with most meanwhile first."""
        found = [
            (address, max(0, hits - self.first.hits.get(address, hits)), hits)
            for address, hits in self.last.hits.items()
        ]
        return sorted(found, key=lambda one: (-one[1], -one[2], one[0]))[:HOTTEST]


def take_sample(
    store: MetadataStore, reader: "Traces", namespaces: list[str], now: float
) -> Sample:
    beats = store.beats()
    hottest = reader.hottest(namespaces, HOTTEST)
    return Sample(
        now, beats, store.node_infos(sorted(beats)), store.stats(),
        # By hand there may stand what is too long for a key, and for whoever is to show it.
        {at: hits for at, hits in hottest.items() if len(at[1]) <= MAX_KEY_CHARACTERS},
    )  # fmt: skip
