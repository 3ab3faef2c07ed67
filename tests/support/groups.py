"""Which tests start processes, and the two bounds on those that do not.

A pytest plugin. The marker `processes` is set here: by a test's folder, by its file's name
(`_nodes`), by what its fixtures start, or by hand. `make quick` runs the tests without it. There a
test that starts a process fails, and so does a test of the folder `unit` that computes for longer
than a second.
"""

import functools
import multiprocessing.process
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hypothesis_profiles import profile
from patience import slowness

if TYPE_CHECKING:
    from types import FrameType

FOLDERS = {"network", "node", "security", "store", "soak", "vllm"}
"""Each of their tests is taken for one that starts processes."""
STARTED_BY = {
    "node_pair",
    "places",
    "redis_server",
    "shared_tls_server",
    "start_node",
    "start_server",
    "valkey_server",
}
"""Fixtures on which all others that start a process depend."""
LIBRARIES = ("torch", "transformers", "vllm")
"""They ask programs about the machine, once in each process."""
UNIT_CPU_SECONDS = 1.0

_may_start = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if (
            item.path.parent.name in FOLDERS
            or item.path.stem.endswith("_nodes")
            or fixtures & STARTED_BY
            or item.get_closest_marker("vllm")
        ):
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _may_start
    _may_start = item.get_closest_marker("processes") is not None
    try:
        return (yield)
    finally:
        _may_start = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    began = time.thread_time()
    yield
    used = time.thread_time() - began
    is_long = profile() == "long" or item.get_closest_marker("alone")
    if used > UNIT_CPU_SECONDS * slowness() and item.path.parent.name == "unit" and not is_long:
        pytest.fail(f"a unit test may compute for {UNIT_CPU_SECONDS} s; this one took {used:.2f} s")


def pytest_configure(config: pytest.Config) -> None:
    guarded: list[tuple[Any, str]] = [
        (subprocess.Popen, "__init__"),
        (multiprocessing.process.BaseProcess, "start"),
    ]
    for owner, name in guarded:
        original = getattr(owner, name)
        setattr(owner, name, _only_with_marker(original))
        config.add_cleanup(partial(setattr, owner, name, original))


def _only_with_marker(start: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(start)
    def guarded(*args: Any, **options: Any) -> object:
        if not _may_start and not _is_called_by(LIBRARIES):
            pytest.fail("this test starts a process: mark it with `processes`")
        return start(*args, **options)

    return guarded


def _is_called_by(packages: Sequence[str]) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in packages:
            return True
        frame = frame.f_back
    return False
