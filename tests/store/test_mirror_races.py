"""Changes, reads, watches and cuts in random order: afterwards mirror and server agree."""

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from mirrors import Mirroring, Watching, kill_tracked
from nodes import wait_until
from servers import command, flush
from store import BlockingStore, EmbeddedServer, StoreUnavailable, layout, open_store
from store.testing.samples import a_location, a_record

KEYS = 4
QUIET_SECONDS = 3.0
NAMESPACES = count()

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["publish", "publish", "withdraw", "claim", "expire", "ask", "ask all", "watch", "cut"]
        ),
        st.integers(0, KEYS - 1),
    ),
    min_size=1,
    max_size=25,
)


@pytest.fixture
def racing(valkey_server: EmbeddedServer) -> Iterator[tuple[BlockingStore, Mirroring, str]]:
    with (
        open_store(valkey_server.url, call_timeout_seconds=5.0) as store,
        Mirroring(valkey_server.url, age_seconds_max=1e9) as mirroring,
    ):
        yield store, mirroring, valkey_server.url


@settings(
    max_examples=examples(60),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking does not reproduce a race
)
@given(of_the_store=STEPS, of_the_mirror=STEPS)
def test_after_a_pause_the_mirror_equals_redis(
    racing: tuple[BlockingStore, Mirroring, str],
    of_the_store: list[Step],
    of_the_mirror: list[Step],
) -> None:
    store, mirroring, url = racing
    flush(url)  # an expired key is pushed when the server removes it: late if there are many others
    namespace = f"races-{next(NAMESPACES)}"
    keys = [f"k{n}" for n in range(KEYS)]
    watchings = {keys[0]: [mirroring.watch(namespace, keys[0])]}

    def change() -> None:
        for step in of_the_store:
            _do(step, store, mirroring, url, namespace, watchings)

    changing = threading.Thread(target=change)
    changing.start()
    for step in of_the_mirror:
        _do(step, store, mirroring, url, namespace, watchings)
    changing.join()

    def agrees() -> bool:
        truth = {key: _exists(url, namespace, key) for key in keys}
        entries = mirroring.do(lambda: dict(mirroring.mirror.entries(namespace)))
        return (
            all((entry.record is not None) is truth[key] for key, entry in entries.items())
            and all(
                w.seen and w.seen[-1] is truth[key] for key, ws in watchings.items() for w in ws
            )
            # What is watched is cached, and its changes will be noticed.
            and watchings.keys() <= entries.keys()
        )

    try:
        wait_until(agrees, QUIET_SECONDS, "the mirror agrees with the server")
        # The same for the other keys; for a key that expires right now the push comes a moment
        # later.
        wait_until(
            lambda: (
                [found is not None for found in mirroring.ask(namespace, keys)]
                == [_exists(url, namespace, key) for key in keys]
            ),
            QUIET_SECONDS,
        )
    finally:
        for watching in (w for ws in watchings.values() for w in ws):
            watching.cancel()
    assert mirroring.do(lambda: len(mirroring.mirror._watches)) == 0


def _do(
    step: Step,
    store: BlockingStore,
    mirroring: Mirroring,
    url: str,
    namespace: str,
    watchings: dict[str, list[Watching]],
) -> None:
    what, n = step
    key = f"k{n}"
    if what == "publish":
        store.publish(a_record(namespace, key), a_location())
    elif what == "withdraw":
        store.withdraw(namespace, key, "node-1", reason="evicted")
    elif what == "claim":
        command(url, "SET", layout.claim(namespace, key), "n:encoding:t", "PX", 1)
    elif what == "expire":
        command(url, "PEXPIRE", layout.record(namespace, key), 1)
    elif what == "ask":
        mirroring.has(namespace, key)
    elif what == "ask all":
        found = mirroring.ask(namespace, [f"k{n}" for n in range(KEYS)])
        assert all(f is None or isinstance(f, StoreUnavailable) or f.key for f in found)
    elif what == "watch":
        watchings.setdefault(key, []).append(mirroring.watch(namespace, key))
    else:
        kill_tracked(url)


def _exists(url: str, namespace: str, key: str) -> bool:
    return command(url, "EXISTS", layout.record(namespace, key)) == b":1"
