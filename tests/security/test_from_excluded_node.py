"""A node that was excluded: what it gets, and what is believed of it, by connections of before.

It is excluded by another authority, or since its certificate has expired. Both nodes are in this
process, and the clock of `protocol.tls` is the test's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from lookup_buffer.errors import MissReason, PipeBroken, PipeClosed
from lookup_buffer.node import links, transfer
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import HANDOFFS, TENSORS, Credentials, Link, dial
from lookup_buffer.node.locate import Located
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.takes import UNREACHED, Owner, Owners
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Wanted
from lookup_buffer.protocol import tls
from lookup_buffer.protocol.auth import Purpose, client_dialogue
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Holds, OwnerReply
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import EXCLUDED_SECONDS, Tls
from node_certificates import DAY, Files, install
from patience import scaled
from peer_servers import MIB, NAMESPACE, Bench, on_a_loop
from store import Location, Record

EXPIRES_SECONDS = 30 * DAY.total_seconds()
LATER_DAYS = 90
"""Of the certificates of who is not to be excluded."""
HANDOFF = (NAMESPACE, "k@r")


class Clock:
    """In the place of the module `time`."""

    ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Fleet:
    """What its operator has: certificates of two authorities, and the files of the node that
    excludes another one, which he replaces."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.ours, self.others = Files(folder / "ours"), Files(folder / "others")
        self.in_use = folder / "in-use"
        self.in_use.mkdir()

    def certified(self, node: str) -> Credentials:
        return Credentials(None, Tls(self.ours.of(node), node))

    def excluding(self, node: str) -> Credentials:
        return Credentials(
            None, Tls(install(self.ours.of(node, days=LATER_DAYS), self.in_use), node)
        )

    def exclude(self, node: str, how: str) -> None:
        """To the files of `node`, which it does not look at yet."""
        if how == "expired":
            self.clock.ahead += EXPIRES_SECONDS + 1.0
        else:
            install(self.others.of(node), self.in_use)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    clock = Clock()
    monkeypatch.setattr(tls, "time", clock)
    monkeypatch.setattr(links, "PEER_CONNECT_SECONDS", scaled(1.0))
    return Fleet(tmp_path, clock)


by_either = pytest.mark.parametrize("how", ["another authority", "expired"])


# -- it reads: connections that were accepted


def server_tick(bench: Bench) -> None:
    bench.credentials.tick()
    bench.server.tick()


async def dialled(bench: Bench, role: str, credentials: Credentials) -> FramedSocket:
    return (await dial(bench.loop, bench.location, bench.endpoint, role, credentials)).framed()


async def is_answered(link: FramedSocket, role: str) -> bool:
    """Whether what it asks for is; if not, the connection has ended."""
    tensors = {"op": "get", "items": [[NAMESPACE, "absent", "boot", 1]]}
    request: Any = tensors if role == TENSORS else Holds(1, *HANDOFF).to_wire()

    def ask() -> bool:
        link.send(request, timeout=scaled(5.0))
        return link.recv_header(timeout=scaled(5.0)) is not None

    try:
        return await asyncio.to_thread(ask)
    except (PipeClosed, PipeBroken):
        return False


@by_either
@pytest.mark.parametrize("role", [TENSORS, HANDOFFS])
def test_what_was_accepted_ends_a_minute_later(fleet: Fleet, role: str, how: str) -> None:
    """Whatever it uses it for: it would read tensors, and take hand-offs, for as long as it
    likes."""

    async def test(bench: Bench) -> None:
        gone = await dialled(bench, role, fleet.certified("gone"))
        fleet.exclude("node-b", how)
        server_tick(bench)
        files = fleet.ours if how == "expired" else fleet.others
        member = Credentials(None, Tls(files.of("member", days=LATER_DAYS), "member"))
        stays = await dialled(bench, role, member)
        assert await is_answered(gone, role), "it may just have to take its new files"
        fleet.clock.ahead += EXCLUDED_SECONDS
        server_tick(bench)
        assert not await is_answered(gone, role)
        assert await is_answered(stays, role)
        gone.abort()
        stays.abort()

    on_a_loop(test, fleet.excluding("node-b"))


@pytest.mark.parametrize("role", [TENSORS, HANDOFFS])
def test_a_handshake_that_began_before_does_not_stay(fleet: Fleet, role: str) -> None:
    """Its certificate was verified by the files of before."""

    async def test(bench: Bench) -> None:
        credentials = fleet.certified("gone")
        assert credentials.tls is not None
        host, _, port = bench.endpoint.removeprefix("tls://").partition(":")
        stream = await links._connected(bench.loop, host, int(port))
        secured = await links._dialled_by_tls(
            bench.loop, stream, credentials.tls, bench.location, bench.endpoint
        )
        fleet.exclude("node-b", "another authority")
        server_tick(bench)
        boot = "" if role == TENSORS else "boot"
        purpose = Purpose(role, bench.endpoint, "node-b", boot, "gone")
        agreed = await links._agree(bench.loop, secured, client_dialogue(None, purpose))
        link = Link(secured, purpose, agreed.macs, agreed.version).framed()
        assert await is_answered(link, role)
        fleet.clock.ahead += EXCLUDED_SECONDS
        server_tick(bench)
        assert not await is_answered(link, role)
        link.abort()

    on_a_loop(test, fleet.excluding("node-b"))


def test_what_was_accepted_ends_with_the_authority(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its certificates may be valid for longer."""
    monkeypatch.setattr("lookup_buffer.cli.certificates.AUTHORITY_DAYS", 30)
    short = Files(tmp_path / "short")

    async def test(bench: Bench) -> None:
        gone = await dialled(bench, TENSORS, Credentials(None, Tls(short.of("gone"), "gone")))
        fleet.clock.ahead += EXPIRES_SECONDS + 1.0 + EXCLUDED_SECONDS
        server_tick(bench)
        assert not await is_answered(gone, TENSORS)
        gone.abort()

    on_a_loop(test, Credentials(None, Tls(short.of("node-b", days=LATER_DAYS), "node-b")))


# -- it is asked: connections that were dialled to it


class Reads:
    """node-a, which fetches tensors of node-b."""

    def __init__(self, bench: Bench, credentials: Credentials) -> None:
        self.bench = bench
        self.arena = Arena(16 * MIB, lambda _address, _reason: None)
        self.fetcher = Fetcher(bench.loop, self.arena, Counters(), credentials)
        self.payload = self.fetcher._receiver.payload
        self.held_up = asyncio.Event()
        self.goes_on = asyncio.Event()

    def tick(self) -> None:
        self.fetcher.credentials.tick()
        self.fetcher.tick()

    def hold_up(self) -> None:
        """The next payload does not come before `goes_on`."""
        self.fetcher._receiver.payload = self._late_payload  # type: ignore[method-assign]

    async def _late_payload(self, link: FramedSocket, memory: memoryview) -> int:
        self.held_up.set()
        await self.goes_on.wait()
        return await self.payload(link, memory)

    def start(self, key: str) -> "asyncio.Future[Fetched]":
        location = Location("node-b", "boot", self._inserted(key), 1)
        record = Record(NAMESPACE, key, "uint8", (1000,), 1000, "tensor", 1.0)
        came: asyncio.Future[Fetched] = self.bench.loop.create_future()
        located = Located(record, ((location, self.bench.endpoint),))
        self.fetcher.fetch([Wanted((NAMESPACE, key), located, came.set_result)])
        return came

    def _inserted(self, key: str) -> int:
        arena = self.bench.arena
        header = TensorHeader.for_tensor("uint8", (1000,))
        item = arena.reserve((NAMESPACE, key), header, origin="local", ttl_seconds=None)
        assert item is not None
        checksum = xxh3_64_intdigest(arena.bytes_of(item))
        arena.release([arena.commit(item, checksum, owner=1).ticket], 1)
        return item.generation

    async def missed(self, came: "asyncio.Future[Fetched]") -> str:
        """Why it did not come; empty: it has."""
        fetched = await asyncio.wait_for(came, scaled(20.0))
        if fetched.held is not None:
            self.arena.release([fetched.held.ticket], FETCH_OWNER)
        return fetched.reason

    async def fetch(self, key: str) -> str:
        return await self.missed(self.start(key))


def reads(fleet: Fleet, test: Callable[[Reads], Awaitable[None]]) -> None:
    async def run(bench: Bench) -> None:
        one = Reads(bench, fleet.excluding("node-a"))
        try:
            await test(one)
            assert one.arena.gauges().reserved_bytes == 0
        finally:
            one.fetcher.close()
            await bench.until(lambda: not one.fetcher._fetches)
            one.arena.close()

    on_a_loop(run, fleet.certified("node-b"))


def test_its_tensors_are_not_fetched_by_a_connection_of_before(fleet: Fleet) -> None:
    async def test(one: Reads) -> None:
        assert await one.fetch("before") == ""
        fleet.exclude("node-a", "another authority")
        one.tick()
        assert await one.fetch("after") == MissReason.PEER_FAILED

    reads(fleet, test)


def test_a_connection_that_was_in_use_is_not_used_again(fleet: Fleet) -> None:
    """It can make a transfer last until long after the files have changed."""

    async def test(one: Reads) -> None:
        one.hold_up()
        came = one.start("slow")
        await asyncio.wait_for(one.held_up.wait(), scaled(20.0))
        fleet.exclude("node-a", "another authority")
        fleet.clock.ahead += 0.9 * EXCLUDED_SECONDS
        one.tick()
        one.goes_on.set()
        assert await one.missed(came) == "", "it was asked for before"
        assert await one.fetch("after") == MissReason.PEER_FAILED

    reads(fleet, test)


@by_either
def test_a_transfer_ends_a_minute_later(fleet: Fleet, how: str) -> None:
    async def test(one: Reads) -> None:
        one.hold_up()
        came = one.start("endless")
        await asyncio.wait_for(one.held_up.wait(), scaled(20.0))
        fleet.exclude("node-a", how)
        one.tick()
        fleet.clock.ahead += EXCLUDED_SECONDS
        one.tick()
        assert await one.missed(came) == MissReason.PEER_FAILED

    reads(fleet, test)


def test_a_holder_whose_certificate_has_expired_proves_itself_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of OpenSSL is not the test's: the new connection succeeds."""
    made: list[Link] = []

    async def counted(*arguments: Any) -> Link:
        made.append(await dial(*arguments))
        return made[-1]

    monkeypatch.setattr(transfer, "dial", counted)

    async def test(one: Reads) -> None:
        for key in ("first", "second"):
            assert await one.fetch(key) == ""
        assert len(made) == 1
        fleet.exclude("node-a", "expired")
        assert await one.fetch("after") == ""
        assert len(made) == 2

    reads(fleet, test)


class Asks:
    """node-a, which takes hand-offs of node-b."""

    def __init__(self, bench: Bench, credentials: Credentials) -> None:
        self.bench = bench
        self.owners = Owners(bench.loop, Directory("node-a"), credentials)

    @property
    def owner(self) -> Owner:
        return self.owners.at(self.bench.location, self.bench.endpoint)

    def tick(self) -> None:
        self.owners.credentials.tick()
        self.owners.tick()

    def insert(self) -> None:
        arena, handoffs = self.bench.arena, self.bench.askers.handoffs
        header = TensorHeader.for_tensor("uint8", (1000,))
        item = arena.reserve_handoff(HANDOFF, header, ttl_seconds=600.0, wanted=False)
        held = arena.commit(item, 1, owner=1)
        handoffs.arrived(HANDOFF)
        arena.release([held.ticket], 1)

    def take(self) -> "asyncio.Task[OwnerReply]":
        loop = self.bench.loop
        return loop.create_task(self.owner.take(HANDOFF, loop.time() + 600.0))


def asks(fleet: Fleet, test: Callable[[Asks], Awaitable[None]]) -> None:
    async def run(bench: Bench) -> None:
        one = Asks(bench, fleet.excluding("node-a"))
        try:
            await asyncio.wait_for(test(one), scaled(60.0))
        finally:
            one.owners.close()

    on_a_loop(run, fleet.certified("node-b"))


@by_either
def test_its_hand_offs_are_not_asked_for_by_a_connection_of_before(fleet: Fleet, how: str) -> None:
    async def test(one: Asks) -> None:
        assert (await one.owner.holds(HANDOFF)).state == "absent"
        one.tick()
        assert len(one.bench.askers) == 1
        fleet.exclude("node-a", how)
        one.tick()
        await one.bench.until(lambda: len(one.bench.askers) == 0)
        if how == "another authority":  # the clock of OpenSSL is not the test's
            assert await one.owner.holds(HANDOFF) == UNREACHED

    asks(fleet, test)


@by_either
def test_a_taker_that_is_queued_leaves_a_minute_later(fleet: Fleet, how: str) -> None:
    async def test(one: Asks) -> None:
        one.insert()
        assert one.bench.askers.handoffs.take(HANDOFF, "another taker") is not None
        queued = one.take()
        await one.bench.until(lambda: any(one.bench.askers._takes.values()))
        fleet.exclude("node-a", how)
        one.tick()
        await asyncio.sleep(0.1)
        assert not queued.done(), "the owner may just have to take its new files"
        fleet.clock.ahead += EXCLUDED_SECONDS
        one.tick()
        assert await queued == UNREACHED

    asks(fleet, test)


def test_a_lease_outlives_a_change_of_files(fleet: Fleet) -> None:
    """An operator who renews certificates costs no hand-off that is acknowledged in time."""

    async def test(one: Asks) -> None:
        one.insert()
        leased = await one.take()
        fleet.exclude("node-a", "another authority")
        for _ in range(2):
            one.tick()
            assert (await one.owner.acknowledge(leased.token)).state == "won"

    asks(fleet, test)
