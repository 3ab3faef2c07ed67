"""What `top` shows: the fleet at one moment, and what was counted since the moment before."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookup_buffer.key import MAX_KEY_CHARACTERS
from store import Beat, MetadataStore, NodeInfo

if TYPE_CHECKING:
    from store.trace import Traces

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
