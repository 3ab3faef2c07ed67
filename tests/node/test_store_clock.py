"""The wall clock of the store jumps ahead: records expire before their time."""

from pathlib import Path

import pytest
import redis
import torch

from clocks import FAKETIME, Clock, environment
from nodes import StartNode, key, wait_until
from servers import StartServer

DAY_SECONDS = 86_400


def expiry_of_records(url: str) -> list[int]:
    """When they expire, in milliseconds since 1970; sorted."""
    with redis.Redis.from_url(url) as client:
        return sorted(client.pexpiretime(name) for name in client.keys("lb:rec:*"))


@pytest.mark.skipif(not FAKETIME.exists(), reason="no libfaketime (make system-packages)")
def test_records_that_expired_by_a_jump_are_written_again(
    start_server: StartServer, start_node: StartNode, tmp_path: Path
) -> None:
    clock = Clock(tmp_path / "clock")
    with environment(clock.variables):
        server = start_server()
    holder, other = (start_node(store_url=server.url) for _ in "ab")
    names = [key() for _ in range(8)]
    with holder.client() as here, other.client() as there:
        for name in names:
            here.insert(name, torch.ones(3))
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0, "they are published")
        day_after = expiry_of_records(server.url)[-1] + 1000 * (DAY_SECONDS - 60)
        clock.set(DAY_SECONDS)

        def are_back() -> bool:
            expiries = expiry_of_records(server.url)
            return len(expiries) == len(names) and expiries[0] > day_after

        wait_until(are_back, 15.0, "they are written again")
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 10.0)
