"""Reads of a key that another host has, while a client of this host is writing it."""

import threading
from pathlib import Path

import pytest
import torch

from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissingTensor, MissReason
from nodes import MIB, StartNode, at_rest, key, tensor_of, wait_until
from patience import scaled

GATE = """
import os, time
from lookup_buffer.node import insert

fill = insert.fill

def fill_later(*arguments):
    while not os.path.exists({path!r}):
        time.sleep(0.01)
    return fill(*arguments)

insert.fill = fill_later
"""
"""The node copies no bytes of an insert before this file exists."""


def test_readers_that_have_time_wait_for_what_is_written_here(
    start_node: StartNode, tmp_path: Path
) -> None:
    gate, name, seconds = tmp_path / "go", key(), scaled(60.0)
    bytes_of = tensor_of("k", 2 * MIB)
    node, there = start_node(prelude=GATE.format(path=str(gate))), start_node()
    found: list[torch.Tensor | MissReason | None] = []
    with node.client() as reader, node.client() as writer, there.client() as other:
        other.insert(name, bytes_of)
        wait_until(lambda: reader.has_caches([name], timeout=1.0) == [True], 10.0)
        threads = [threading.Thread(target=writer.insert, args=(name, bytes_of))]
        threads[0].start()
        wait_until(lambda: node.stats()["reserved_bytes"], 10.0)
        with pytest.raises(MissingTensor, match="busy"):
            reader.select(name)
        (handle,) = reader.prefetch([name], wait_seconds=seconds)
        threads += [
            threading.Thread(target=lambda: found.append(reader.select(name, timeout=seconds))),
            threading.Thread(
                target=lambda: found.extend(reader.select_many([name], timeout=seconds))
            ),
        ]
        for thread in threads[1:]:
            thread.start()
        with pytest.raises(MissingTensor, match="busy"):
            reader.select(name)
        assert handle.state is PrefetchState.PENDING
        gate.touch()
        for thread in threads:
            thread.join()
        assert handle.wait(seconds) is PrefetchState.RESIDENT
        reader.release(handle)
        assert len(found) == 2
        assert all(isinstance(one, torch.Tensor) and torch.equal(one, bytes_of) for one in found)
        assert node.stats().get("misses_no_room", 0) == 0
    at_rest(node)
