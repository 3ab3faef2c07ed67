"""The scheduler side with all that surrounds it, for tests of its rules."""

from typing import Any

from connector_standins import (
    EMBED_BYTES,
    LedgerBuffer,
    Stored,
    step_output,
)
from connectors.ec.metadata import StepMetadata
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from lookup_buffer.protocol.messages import ClaimOutcome

WAIT_SECONDS = 5.0
METADATA_WAIT_SECONDS = 20.0
BOUND_SECONDS = 30.0
LEASE_SECONDS = 12.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """One scheduler side with its surroundings."""

    def __init__(
        self,
        *,
        producer: bool = True,
        consumer: bool = True,
        steps_in_flight: int = 2,
        encode_rows: int = 1 << 13,
        **raw: Any,
    ) -> None:
        self.buffer = LedgerBuffer()
        self.clock = Clock()
        settings = ConnectorSettings(
            **{
                "fetch_wait_seconds": WAIT_SECONDS,
                "metadata_wait_seconds": METADATA_WAIT_SECONDS,
                "idle_wait_seconds": 0,
                "capacity_bytes": "64MiB",
                **raw,
            }
        )
        shape = EngineShape(
            producer, consumer, steps_in_flight, EMBED_BYTES, encode_rows=encode_rows
        )
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client, settings, shape, metadata_fields=lambda _: set(), clock=self.clock
        )

    def ensure(self, request: Any, computed: int = 0) -> bool:
        return self.scheduler.gate.ensure_cache_available(request, computed)

    def allocate(self, request: Any, index: int = 0) -> bool:
        """What vLLM does when it makes room: ask, allocate, tell."""
        hit = self.scheduler.has_cache_item(request.mm_features[index].identifier)
        self.scheduler.item_allocated(request, index, is_hit=hit)
        return hit

    def build(self, *args: Any, **kwargs: Any) -> StepMetadata:
        return self.scheduler.build_metadata(step_output(*args, **kwargs))

    def store(self, identifier: str, **kwargs: Any) -> None:
        self.buffer.stored[identifier] = Stored(**kwargs)
        self.buffer.published(identifier)

    def prefetched(self) -> list[list[str]]:
        return [keys for name, keys, _ in self.buffer.calls if name == "prefetch"]


def make_bench(answers: ClaimOutcome = ClaimOutcome.PENDING, **raw: object) -> Bench:
    """The node answers a set of claims when the test says so."""
    raw = {"claim_wait_seconds": BOUND_SECONDS, "claim_lease_seconds": LEASE_SECONDS, **raw}
    bench = Bench(**raw)  # type: ignore[arg-type]
    bench.buffer.fleet.answers = answers
    return bench


def counted(bench: Bench) -> dict[str, int]:
    totals = bench.scheduler.counters.totals()
    return {name: n for name, n in totals.items() if name.startswith(("claim:", "encode:"))}


def claimed(bench: Bench) -> list[list[str]]:
    return [[key.mm_hash for key in one.keys] for one in bench.buffer.fleet.sets]
