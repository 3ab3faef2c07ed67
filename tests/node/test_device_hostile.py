"""Foreign connections to a pool's port, with any bytes: the pool's process continues, serves its
readers meanwhile, and leaks nothing.

The pool is in one process, which still runs at the end; a reader is in another.
"""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
import torch

from device_ends import LARGE, DeviceEnd, facts, put, warm
from lookup_buffer.codec import writable_bytes
from lookup_buffer.device import protocol
from lookup_buffer.device.server import INCOMING_PAIRS_MAX
from lookup_buffer.errors import PipeError
from lookup_buffer.pipes import gloo
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS
from lookup_buffer.protocol.framing import unpack
from lookup_buffer.protocol.header import TensorHeader
from nodes import StartNode, at_rest, tensor_of, wait_until, with_store
from raw_ends import RawEnd, hostile, offer

AT_ONCE = 16
NOTHING = {"pool": "0" * 12, "namespace": "n", "key": "k", "mark": 1}
"""A request for an absent item."""
_numbers = count()


class ForeignClient(RawEnd):
    """A client after the handshake with a pool, and the agreement on how the payload moves."""

    def __init__(self, pool: DeviceEnd) -> None:
        super().__init__(_address_of(pool), ["pair", "gloo", gloo.version()])
        self._last = 0

    def ask(self, fields: Any) -> None:
        self.offer(protocol.message(fields))

    def offer(self, value: torch.Tensor, key: bytes | None = None) -> None:
        self._last += 1
        name = str(value.dtype).removeprefix("torch.")
        header = TensorHeader.for_tensor(name, tuple(value.shape)).to_fields()
        raw = bytes(writable_bytes(value)) if value.nbytes else None
        self.send(["offer", self._last, key, header], raw)

    def verdict(self) -> Any:
        """The answer to its request."""
        frame = self.link.recv_header(5.0)
        while frame.header[0] != "offer":
            frame = self.link.recv_header(5.0)
        raw = bytearray(frame.payload_nbytes)
        self.link.recv_into(memoryview(raw), timeout=5.0)
        return unpack(raw)


def _address_of(pool: DeviceEnd) -> str:
    return f"tcp://127.0.0.1:{pool.do('lane.port')}"


class Ends:
    def __init__(self, stack: ExitStack, nodes: StartNode) -> None:
        both = [nodes(), nodes()]
        with_store(*both)
        self.pool = DeviceEnd(both[0], "foreign", receives=False)
        self.reader = DeviceEnd(both[1], "foreign")
        for end in (self.pool, self.reader):
            stack.callback(end.end)
        self.pool.do("insert(TensorKey('one'), torch.zeros(3))")  # and has a connection for it
        self._files = self.pool.do("files()")
        warm(self.pool, self.reader)
        self.reads()

    def reads(self) -> None:
        """The reader gets what the pool has by the lane."""
        key = f"some-{next(_numbers)}"
        put(self.pool, key, f"tensor_of({key!r}, {LARGE})")
        before = self.reader.counted("hits_lane")
        assert self.reader.do(f"read(TensorKey({key!r}))") == facts(tensor_of(key, LARGE))
        assert self.reader.counted("hits_lane") == before + 1, self.reader.node.stats()

    def at_rest(self) -> None:
        """Without its reader the pool has nothing of foreign connections."""
        self.reader.do("leave()")

        def is_alone() -> bool:
            threads, files = self.pool.do("(threads(), files())")
            pairs = [name for name in threads if name.startswith(("lb-pipe", "lb-lane-peer"))]
            return not pairs and bool(files <= self._files + 1)

        wait_until(is_alone, 30.0, f"{self._files}: {self.pool.do('(threads(), files())')}")
        assert self.pool.do("lane.gauges().pinned_bytes") == 0


@pytest.fixture(scope="module")
def ends(module_nodes: StartNode) -> Iterator[Ends]:
    with ExitStack() as stack:
        made = Ends(stack, module_nodes)
        yield made
        made.at_rest()
        for end in (made.pool, made.reader):
            at_rest(end.node)


def test_garbage_ends_its_own_connection(ends: Ends) -> None:
    def closed_at_once(data: bytes) -> bool:
        with socket.create_connection(("127.0.0.1", port), 5.0) as stream:
            stream.settimeout(3 * HANDSHAKE_SECONDS)
            try:
                stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(4096):
                    pass
            except TimeoutError:
                return False
            except OSError:
                pass  # the pool was faster
            return True

    def closed_after_a_handshake(data: bytes) -> bool:
        with ForeignClient(ends.pool) as client:
            client.send_bytes(data)
            return client.hung_up()

    port = ends.pool.do("lane.port")
    said = hostile("frames", "node", "pipe")
    with ThreadPoolExecutor(AT_ONCE) as many:
        assert all(many.map(closed_at_once, said.values()))
    left = dict(zip(said, map(closed_after_a_handshake, said.values()), strict=True))
    assert all(left.values()), [name for name, ended in left.items() if not ended]
    ends.reads()


def test_a_silent_connection_delays_others_at_most_a_handshake(ends: Ends) -> None:
    port = ends.pool.do("lane.port")
    with ExitStack() as silent:
        for _ in range(3 * INCOMING_PAIRS_MAX):
            stream = silent.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
            stream.sendall(b"LB01")  # half of a handshake
        ends.reads()

        def is_served() -> bool:
            try:
                with ForeignClient(ends.pool) as client:
                    client.ask({"ask": 1, **NOTHING})
                    return bool(client.verdict() == {"status": "stale"})
            except PipeError:  # it waited for its turn for as long as a handshake may take
                return False

        wait_until(is_served, 5 * HANDSHAKE_SECONDS)


QUESTIONS: dict[str, Any] = {
    "no fields": {},
    "no number": {"mark": 0},
    "a number that is none": {"ask": "1", "mark": 0},
    "a list": [1, 2],
    "a mark that is none": {"ask": 1, "pool": "p", "namespace": "n", "key": "k", "mark": "1"},
    "a key that is none": {"ask": 1, "pool": "p", "namespace": "n", "key": 7, "mark": 1},
    "a float": torch.zeros(3),
    "of no bytes": torch.zeros(0, dtype=torch.uint8),
    "in two dimensions": torch.zeros(2, 2, dtype=torch.uint8),
    "that is no msgpack": torch.full((9,), 0xC1, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_invalid_request_ends_its_pair(ends: Ends, name: str) -> None:
    question = QUESTIONS[name]
    with ForeignClient(ends.pool) as client:
        client.offer(question if torch.is_tensor(question) else protocol.message(question))
        assert client.hung_up()


def test_a_too_large_request_ends_its_pair(ends: Ends) -> None:
    for nbytes in (protocol.REQUEST_BYTES_MAX + 1, 1 << 39):
        with ForeignClient(ends.pool) as client:
            client.send(offer(1, None, nbytes))
            assert client.hung_up()


def test_a_request_for_another_pool_or_an_absent_item_is_stale(ends: Ends) -> None:
    put(ends.pool, "there", f"torch.zeros({LARGE}, dtype=torch.uint8)")
    newest = "[(*entry.key, entry.mark) for entry in lane.pool.own_entries()][-1]"
    namespace, _, mark = ends.pool.do(newest)
    there = {"pool": ends.pool.do("lane.id"), "namespace": namespace, "key": "there", "mark": mark}
    others = ({"pool": "0" * 12}, {"namespace": "0" * 64}, {"key": "no"}, {"mark": mark + 1})
    with ForeignClient(ends.pool) as client:
        for number, other in enumerate(others, start=1):
            client.ask({"ask": number, **there, **other})
            assert client.verdict() == {"status": "stale"}
        client.ask({"ask": 9, **there})
        assert client.verdict() == {"status": "ok"}


def test_unrequested_bytes_do_not_fill_the_memory(ends: Ends) -> None:
    few, room = torch.zeros(60_000, dtype=torch.uint8), 2 * protocol.INBOX_BYTES
    with ForeignClient(ends.pool) as client:
        is_over = False
        try:
            for number in range(room // few.nbytes):
                client.offer(few, b"k%d" % number)
        except PipeError:
            is_over = True
        assert is_over or client.hung_up()


TORN = [
    "nothing", "half", "a longer name", "a longer address", "of another family", "more", "zeros",
]  # fmt: skip


def _torn(name: str, value: bytes) -> bytes:
    host_bytes = struct.unpack_from("=Q", value)[0]
    at = 8 + host_bytes
    match name:
        case "nothing":
            return b""
        case "half":
            return value[: len(value) // 2]
        case "a longer name":
            return struct.pack("=Q", 1 << 40) + value[8:]
        case "a longer address":
            return value[:at] + struct.pack("=Q", 1 << 20) + value[at + 8 :]
        case "of another family":
            return value[: at + 8] + b"\xff\xff" + value[at + 10 :]
        case "more":
            return value + bytes(3000)
        case _:
            return bytes(len(value))


@pytest.mark.parametrize("name", TORN)
def test_an_invalid_communicator_address_ends_its_pair(ends: Ends, name: str) -> None:
    """Gloo reads as many bytes as such a value states, and ended the process."""
    with ForeignClient(ends.pool) as client:
        client.ask({"ask": 0, "mark": 0})
        while (header := client.receive())[0] != "offer":
            pass  # its request is acknowledged
        client.send(["pull", header[1]])
        while (header := client.receive())[0] != "pair":
            pass
        _, theirs, value = header
        rank = theirs.removesuffix("0") + "1"
        client.send(["pair", rank, _torn(name, value)])
        assert client.hung_up()
    ends.reads()


def test_at_the_limit_the_longest_idle_connection_is_closed(ends: Ends) -> None:
    with ExitStack() as crowd:
        clients = [crowd.enter_context(ForeignClient(ends.pool)) for _ in range(INCOMING_PAIRS_MAX)]
        for client in (*clients, clients[0]):
            client.ask({"ask": 1, **NOTHING})
            assert client.verdict() == {"status": "stale"}
        with ForeignClient(ends.pool) as newest:
            newest.ask({"ask": 1, **NOTHING})
            assert newest.verdict() == {"status": "stale"}
            assert clients[1].hung_up()
            clients[0].ask({"ask": 2, **NOTHING})
            assert clients[0].verdict() == {"status": "stale"}
    warm(ends.pool, ends.reader)  # which may have been pushed out as well
