"""A device location in a Redis record is a hint: if it is wrong, the bytes still arrive in time.
Each wrong location is counted, logged once, and leaves nothing behind.

The test replaces a valid record; the reader's node has not read it before.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import pytest

from device_ends import LARGE, DeviceEnd, facts, put, warm
from lookup_buffer.errors import MissingTensor
from nodes import StartNode, at_rest, tensor_of, wait_until, with_store
from patience import scaled
from servers import command
from store import DeviceLocation, EmbeddedServer, open_store

BOUND_SECONDS = scaled(10.0)
"""Of a read: several times the deadline of a lane for so little."""
_numbers = count()
Fields = dict[str, str]


class Ends:
    """`first` has what `second` reads; `third` is another pool."""

    def __init__(self, stack: ExitStack, nodes: StartNode, url: str) -> None:
        self._url = url
        three = [nodes() for _ in range(3)]
        with_store(*three)
        self.first, self.second, self.third = (DeviceEnd(node, "lies") for node in three)
        for end in (self.first, self.second, self.third):
            stack.callback(end.end)
        with suppress(MissingTensor):
            self.second.do("read(TensorKey('nothing'))")  # and has a connection for it
        self._files = self.second.do("files()")
        warm(self.first, self.second)
        warm(self.third, self.second)

    def fallbacks_of(self, change: Callable[[DeviceLocation], Fields]) -> dict[str, int]:
        """The fallbacks that a read by the changed record costs; the bytes are right."""
        key = f"changed-{next(_numbers)}"
        put(self.first, key, f"tensor_of({key!r}, {LARGE})")
        with open_store(self._url, call_timeout_seconds=2.0) as store:
            (record,) = [record for record in store.scan() if record.key == key]
        name = f"lb:rec:{record.namespace}:{{{key}}}"
        for field, text in change(record.devices[0]).items():
            assert command(self._url, "HSET", name, field, text).startswith(b":")
        before, started = self._fallbacks(), time.monotonic()
        assert self.second.do(f"read(TensorKey({key!r}))") == facts(tensor_of(key, LARGE))
        assert time.monotonic() - started < BOUND_SECONDS
        now = self._fallbacks().items()
        return {why: n - before.get(why, 0) for why, n in now if n > before.get(why, 0)}

    def _fallbacks(self) -> dict[str, int]:
        prefix = "lane_fallbacks_"
        named = self.second.node.stats().items()
        return {name.removeprefix(prefix): n for name, n in named if name.startswith(prefix)}

    def at_rest(self) -> None:
        """With the other pools all goes that was there for them, or what was taken for them."""
        for end in (self.first, self.third):
            end.do("leave()")

        def is_alone() -> bool:
            threads, files = self.second.do("(threads(), files())")
            pairs = [name for name in threads if name.startswith(("lb-pipe", "lb-lane-peer"))]
            return not pairs and bool(files <= self._files + 1)

        wait_until(is_alone, 30.0, f"{self._files}: {self.second.do('(threads(), files())')}")
        assert self.second.do("lane.gauges().pinned_bytes") == 0
        logged = [line for line in self.second.do("logged") if "was not used" in line]
        reasons = [line.rpartition("(")[2].partition(";")[0] for line in logged]
        assert len(reasons) == len(set(reasons)), logged


@pytest.fixture(scope="module")
def ends(module_nodes: StartNode, valkey_server: EmbeddedServer) -> Iterator[Ends]:
    with ExitStack() as stack:
        made = Ends(stack, module_nodes, valkey_server.url)
        yield made
        made.at_rest()
        at_rest(made.second.node)


def changed(at: DeviceLocation, **other: Any) -> Fields:
    return {f"on:{at.node}": at._replace(**other).text}


@contextmanager
def answering(data: bytes | None) -> Iterator[int]:
    """A port that sends `data` to each client and is then silent; with None it sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as open_ones:

        def serve() -> None:
            while True:
                try:
                    stream = open_ones.enter_context(listener.accept()[0])
                    stream.sendall(data or b"")
                except OSError:
                    if listener.fileno() < 0 or data is None:
                        return

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            serving.join(5.0)


def is_left_alone(ends: Ends, port: int) -> None:
    """Making the pair with a pool there fails, and then pauses."""
    pool = secrets.token_hex(6)
    seen: set[str] = set()

    def comes_to_rest() -> bool:
        time.sleep(0.05)
        seen.update(ends.fallbacks_of(lambda at: changed(at, port=port, pool=pool)))
        return "abandoned" in seen

    wait_until(comes_to_rest, 40.0, f"{port}")
    assert seen <= {"cold", "abandoned"}


def test_a_port_without_a_listener(ends: Ends) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, so that no other process listens there meanwhile
        is_left_alone(ends, silent.getsockname()[1])


@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"LB01" + 12 * b"\xff"],
    ids=["nothing", "http", "an exabyte"],
)  # fmt: skip
def test_a_port_of_another_program(ends: Ends, data: bytes) -> None:
    with answering(data) as port:
        is_left_alone(ends, port)


def test_a_port_of_a_node(ends: Ends) -> None:
    """Which shakes hands as a pool does."""
    with open_store(ends.first.node.config.store_url, call_timeout_seconds=2.0) as store:
        node = ends.first.node.node_id
        endpoint = store.node_infos([node])[node].endpoint
    is_left_alone(ends, int(endpoint.rpartition(":")[2]))


@pytest.mark.parametrize("port", [0, 99999])
def test_an_invalid_port(ends: Ends, port: int) -> None:
    is_left_alone(ends, port)


def test_the_port_of_another_pool(ends: Ends) -> None:
    port, pool = ends.third.do("lane.port"), secrets.token_hex(6)
    seen: set[str] = set()

    def is_stale() -> bool:
        seen.update(ends.fallbacks_of(lambda at: changed(at, port=port, pool=pool)))
        return "stale" in seen

    wait_until(is_stale, 40.0)
    assert seen <= {"cold", "stale"}
    ends.second.do(f"lane._pairs.fail({pool!r})")


def test_another_mark(ends: Ends) -> None:
    assert ends.fallbacks_of(lambda at: changed(at, mark=at.mark + 7)) == {"stale": 1}


def test_another_library(ends: Ends) -> None:
    assert ends.fallbacks_of(lambda at: changed(at, library="00000000")) == {"version": 1}


@pytest.mark.parametrize("field", ["no place", f"1:gloo:{'0' * 8}:1:short", "", "1:gloo"])
def test_an_invalid_device_location_is_ignored(ends: Ends, field: str) -> None:
    assert ends.fallbacks_of(lambda at: {f"on:{at.node}": field}) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": f"[{2 * LARGE}]", "nbytes": str(2 * LARGE)},
        {"shape": f"[{LARGE // 2}]", "nbytes": str(LARGE // 2)},
        {"shape": f"[{LARGE // 4}]", "dtype": "float32"},
    ],
    ids=["twice as many", "half as many", "another dtype"],
)
def test_bytes_that_differ_from_their_announcement_cost_a_fallback(
    ends: Ends, fields: Fields
) -> None:
    assert ends.fallbacks_of(lambda _at: fields) == {"peer_failed": 1}
    warm(ends.first, ends.second)


@pytest.mark.parametrize("nbytes", [128 << 20, 1 << 39, 1 << 45], ids=["pool", "half TiB", "more"])
def test_more_bytes_than_any_pool_has(ends: Ends, nbytes: int) -> None:
    found = ends.fallbacks_of(lambda _at: {"shape": f"[{nbytes}]", "nbytes": str(nbytes)})
    assert found.keys() <= {"no_room"}


def test_an_inconsistent_size_is_not_requested(ends: Ends) -> None:
    assert ends.fallbacks_of(lambda _at: {"nbytes": str(LARGE + 1)}) == {}
