"""The demo's Valkey and nodes: two hosts on one machine, and nothing left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.demo.fleet import Fleet, NodeFailure, start_node
from patience import scaled
from store import BlockingStore

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def _wait_for_nodes(store: BlockingStore, names: set[str]) -> None:
    """Until they beat and, a moment later, have described themselves."""
    deadline = time.monotonic() + scaled(5.0)
    while set(store.node_infos(sorted(names))) != names and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(store.beats()) == set(store.node_infos(sorted(names))) == names


def test_two_nodes_act_as_two_hosts(tmp_path: Path) -> None:
    with Fleet(("host-a", "host-b"), tmp_path) as fleet:
        _wait_for_nodes(fleet.store, {"host-a", "host-b"})
        infos = fleet.store.node_infos(["host-a", "host-b"])
        assert len({info.endpoint for info in infos.values()}) == 2
        configs = [node.ec_transfer_config() for node in fleet.nodes.values()]
        sockets = {config["ec_connector_extra_config"]["node_socket"] for config in configs}
        assert len(sockets) == 2


def test_the_error_of_a_node_that_cannot_start_has_its_output(tmp_path: Path) -> None:
    directory = tmp_path / "too-long-for-a-unix-socket-path".ljust(120, "-")
    with pytest.raises(NodeFailure, match="host-a"):
        start_node("host-a", directory, "unix:///nowhere", tmp_path / "log")


def test_the_fleet_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from pathlib import Path\n"
        "from examples.demo.fleet import Fleet\n"
        f"with Fleet(('host-a',), Path({str(tmp_path)!r})) as fleet:\n"
        "    print(fleet.nodes['host-a'].process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        node = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + scaled(5.0)
    while Path(f"/proc/{node}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(node, 0)
