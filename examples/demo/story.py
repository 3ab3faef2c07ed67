"""The demo's requests to two running engines, in their order.

Runs in the controlling process. It uses the engines and the store, but does not start them.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from examples.demo.engine import Answer, DemoEngine, Question
from examples.demo.model_size import ModelSize
from examples.demo.outcome import KeyFacts, Origin, Outcome, Purpose
from store import BlockingStore

PROMPT = "What is in this picture?"
_OWN_REPEATS = 3
_WARM_UP_REQUESTS = 4
_WARM_UPS = 3
# A vLLM worker spins on its core for a second after each step. On few cores that would slow down
# the other engine's next request, which would not happen on two hosts.
_REST_SECONDS = 1.2
_PHOTOGRAPHS = Path(__file__).parent / "photographs"
FIRST_PHOTOGRAPH, SECOND_PHOTOGRAPH, WARM_UP_PHOTOGRAPH = "cat", "coffee", "rocket"

Expected = Mapping[str, tuple[int, ...]]
Report = Callable[[Outcome], None]


def question(photograph: str) -> Question:
    return Question.about(_PHOTOGRAPHS / f"{photograph}.jpg", PROMPT)


def warm_up_text(engine: DemoEngine, size: ModelSize) -> None:
    """Run the text model _WARM_UPS times, on a prompt as long as the real ones, without any image.

    The first passes of a fresh engine include the set-up of its memory and threads, regardless of
    where an encoding comes from. `Story.warm_up` does the same for the paths of images.
    """
    prompt = "." * (size.embeddings_per_image + len(PROMPT))
    for _ in range(_WARM_UPS):
        engine.generate(Question((), prompt))


def reference_tokens(baseline: DemoEngine) -> dict[str, tuple[int, ...]]:
    """The tokens that all other engines must produce, from an engine without a connector."""
    return {
        photograph: baseline.generate(question(photograph)).tokens
        for photograph in (WARM_UP_PHOTOGRAPH, FIRST_PHOTOGRAPH, SECOND_PHOTOGRAPH)
    }


class Story:
    """Sends the requests and records outcomes. `engines` maps a node's name to its engine."""

    def __init__(
        self,
        engines: Mapping[str, DemoEngine],
        store: BlockingStore,
        expected: Expected,
        report: Report,
    ) -> None:
        self._engines = engines
        self._store = store
        self._expected = expected
        self._report = report
        self._photographs: dict[str, str] = {}
        self.outcomes: list[Outcome] = []
        self.encoder_runs_of_warm_up = dict.fromkeys(engines, 0)

    @property
    def encoder_runs(self) -> dict[str, int]:
        """Images encoded per engine, by vLLM's own count, without those of the warm-up."""
        before = self.encoder_runs_of_warm_up
        return {name: e.encoder_runs - before[name] for name, e in self._engines.items()}

    def warm_up(self) -> None:
        """Each engine's first photograph: the first engine encodes it, the second loads it.

        Then both repeat it, the same number of times. The first passes of an engine over a
        photograph include the set-up of memory and kernels, regardless of where the encoding comes
        from. The other requests measure servers past that set-up.
        """
        for name in self._engines:
            for _ in range(_WARM_UP_REQUESTS):
                self._ask(Purpose.WARM_UP, name, WARM_UP_PHOTOGRAPH)
        runs = {name: engine.encoder_runs for name, engine in self._engines.items()}
        self.encoder_runs_of_warm_up = runs

    def run(self) -> None:
        """All requests that count.

        Each engine's own cache holds one image, so the second photograph evicts the first one.
        """
        first, second = self._engines
        self._ask(Purpose.FIRST, first, FIRST_PHOTOGRAPH)
        for _ in range(_OWN_REPEATS):
            self._ask(Purpose.REPEAT, first, FIRST_PHOTOGRAPH)
        self._ask(Purpose.OTHER, second, FIRST_PHOTOGRAPH)
        self._ask_both(SECOND_PHOTOGRAPH)
        self._ask(Purpose.AGAIN, first, FIRST_PHOTOGRAPH)

    def _ask(self, purpose: Purpose, name: str, photograph: str) -> None:
        holders = self._holders()
        time.sleep(_REST_SECONDS)
        engine = self._engines[name]
        self._record(purpose, name, photograph, engine.generate(question(photograph)), holders)

    def _ask_both(self, photograph: str) -> None:
        holders = self._holders()
        time.sleep(_REST_SECONDS)
        for engine in self._engines.values():
            engine.submit([question(photograph)])
        for name, engine in self._engines.items():
            self._record(Purpose.AT_ONCE, name, photograph, engine.collect()[0], holders)

    def _record(
        self,
        purpose: Purpose,
        name: str,
        photograph: str,
        answer: Answer,
        holders: Mapping[str, tuple[str, ...]],
    ) -> None:
        origin = Origin(answer.origins[0]) if answer.origins else Origin.CACHED
        source = ""
        if origin is Origin.LOADED:
            source = self._source(name, holders.get(answer.identifiers[0], ()))
        self._photographs.update(dict.fromkeys(answer.identifiers, photograph))
        outcome = Outcome(
            purpose=purpose,
            engine=name,
            photograph=photograph,
            origin=origin,
            source=source,
            queued_seconds=answer.queued_seconds,
            ttft_seconds=answer.ttft_seconds,
            tokens=answer.tokens,
            tokens_expected=self._expected[photograph],
        )
        self.outcomes.append(outcome)
        self._report(outcome)

    def _source(self, name: str, holders: tuple[str, ...]) -> str:
        """Where the bytes were when the request was sent, by the records in Redis at that time."""
        if name in holders:
            return f"arena of {name}"
        others = holders or tuple(other for other in self._engines if other != name)
        return f"{', '.join(others)} over TCP"

    def _holders(self) -> dict[str, tuple[str, ...]]:
        return {
            record.key: tuple(location.node for location in record.locations)
            for record in self._store.scan()
        }

    def records(self) -> tuple[KeyFacts, ...]:
        """All records that are in Redis now, oldest first."""
        return tuple(
            KeyFacts(
                photograph=self._photographs.get(record.key, ""),
                namespace=record.namespace,
                key=record.key,
                dtype=record.dtype,
                shape=record.shape,
                nbytes=record.nbytes,
                nodes=tuple(sorted(location.node for location in record.locations)),
                hits=self._store.hits(record.namespace, [record.key])[0],
            )
            for record in sorted(self._store.scan(), key=lambda record: record.created)
        )
