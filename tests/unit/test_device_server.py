"""PoolServer where the system grants no thread: it loses that pair, and nothing else; or it does
not start."""

from collections.abc import Iterator

import pytest

from lookup_buffer.device import protocol
from lookup_buffer.device.memory import HostPoolMemory
from lookup_buffer.device.pool import DevicePool
from lookup_buffer.device.protocol import make_upgrade, pipe_memory, version_of
from lookup_buffer.device.server import PoolServer
from lookup_buffer.device.stats import LaneStats
from lookup_buffer.errors import PipeBroken
from lookup_buffer.pipes.connect import open_tcp_end
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.protocol.auth import LANE
from nodes import wait_until
from patience import scaled
from raw_ends import RawEnd
from thread_limits import in_use, is_within, without_threads

HOST = "127.0.0.1"
SECONDS = scaled(5.0)
MEMORY = HostPoolMemory()
VERSION = version_of("gloo", MEMORY)
LIMITS = PipeLimits(silence_seconds=SECONDS)
PROBE = {"ask": 1, "pool": "another", "namespace": "n", "key": "k", "mark": 1}


def started(stats: LaneStats) -> PoolServer:
    return PoolServer(
        DevicePool(1 << 20), MEMORY, VERSION, "pool",
        host=HOST, token=None, limits=LIMITS, stats=stats,
    )  # fmt: skip


@pytest.fixture
def server() -> Iterator[PoolServer]:
    stats = LaneStats("gloo")
    server = started(stats)
    yield server
    server.close()
    assert not stats.counts(), "a limit on threads is no failure of the device"


def answers(server: PoolServer) -> bool:
    reader = open_tcp_end(
        f"lane://{HOST}:{server.port}",
        listen=False,
        timeout=SECONDS,
        token=None,
        limits=LIMITS,
        upgrade=make_upgrade(VERSION, MEMORY)(False, SECONDS),
        memory=pipe_memory(VERSION, MEMORY),
        purpose=LANE,
    )
    with reader:
        reader.send_tensor(protocol.message(PROBE))
        reply = reader.recv_tensor(protocol.reply_key(1), timeout=SECONDS)
    return protocol.fields_in(reply) == {"status": "stale"}


@pytest.mark.parametrize("name", ["lb-pipe-out", "lb-pipe-in"])
def test_a_pair_without_its_threads_leaves_nothing(server: PoolServer, name: str) -> None:
    before = in_use()
    at, agreement = f"tcp://{HOST}:{server.port}", ["pair", "gloo", VERSION.library_version]
    with without_threads(name), RawEnd(at, agreement) as raw:
        assert raw.hung_up()
    wait_until(lambda: is_within(before), SECONDS, f"{before}: {in_use()}")
    assert answers(server)


def test_without_a_thread_to_accept_it_does_not_start_and_leaves_nothing() -> None:
    before = in_use()
    with without_threads("lb-lane-accept"), pytest.raises(PipeBroken) as caught:
        started(LaneStats("gloo"))
    assert is_within(before), "without a garbage collection"
    assert caught.value.__traceback__
