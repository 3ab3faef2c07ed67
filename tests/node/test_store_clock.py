"""The wall clock of the store jumps ahead: records expire before their time."""

from pathlib import Path

import pytest
import torch

from clocks import FAKETIME, Clock, environment
from nodes import StartNode, key, wait_until
from servers import StartServer

DAY_SECONDS = 86_400


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
        clock.set(DAY_SECONDS)
        wait_until(lambda: not any(there.has_caches(names, timeout=1.0)), 10.0, "they have expired")
        wait_until(lambda: all(there.has_caches(names, timeout=1.0)), 15.0, "they are back")
