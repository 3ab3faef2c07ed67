"""`doctor` on hosts of a network: wrong addresses, and an MTU on the way that is too small."""

import json
import subprocess
from typing import Any

import pytest

from command_line import PROGRAM, RUN_SECONDS, environment
from network import MakeNetwork, Network
from nodes import NodeProcess, wait_until
from servers import free_port

pytestmark = pytest.mark.part(name="network")


def examine(network: Network, node: NodeProcess, *, alive: int, code: int) -> list[dict[str, Any]]:
    """The findings about addresses of `doctor` on the host of `node`, once it sees all others."""
    wait_until(lambda: node.stats()["nodes_alive"] == alive, 10.0, f"{alive} nodes are alive")
    token = node.settings.token
    assert token is not None
    settings = {
        "LOOKUP_BUFFER_DIRECTORY": str(node.settings.directory),
        "LOOKUP_BUFFER_STORE_URL": network.store_url,
        "LOOKUP_BUFFER_CAPACITY_BYTES": str(node.settings.capacity_bytes),
        "LOOKUP_BUFFER_TOKEN": token.get_secret_value(),
    }
    done = subprocess.run(
        network.hosts[node.node_id].command(PROGRAM, "doctor", "--json"),
        env=environment(settings), capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    checks = json.loads(done.stdout)["checks"]
    return [one for one in checks if one["name"].startswith("address")]


def test_wrong_addresses(make_network: MakeNetwork) -> None:
    network = make_network("a", "b", "c", "d", "e")
    port = free_port()
    wrong = {
        "b": (f"tcp://10.77.0.99:{port}", "no answer there in time"),  # which nobody has
        "c": (f"tcp://192.0.2.1:{port}", "there is no route to it"),
        "d": (f"tcp://{network.hosts['d'].address}:1", "nothing listens there"),
    }
    a = network.node("a")
    for name, (endpoint, _) in wrong.items():
        network.node(name, advertise=endpoint)
    network.node("e")
    *failed, works = examine(network, a, alive=5, code=1)
    assert works["verdict"] == "ok"
    assert "2 of 5 (connections: 2)" in works["found"]
    for check, (name, (endpoint, what)) in zip(failed, wrong.items(), strict=True):
        assert check["verdict"] == "fail"
        assert check["found"] == f"{name} at {endpoint}: {what}, dialled by a"
        assert f"`advertise` of {name}" in check["advice"]


def test_a_node_that_advertises_loopback(make_network: MakeNetwork) -> None:
    network = make_network("a", "b")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    a, b = network.node("a"), network.node("b", listen=endpoint)
    for node in (a, b):
        failed, *_ = examine(network, node, alive=2, code=1)
        assert failed["verdict"] == "fail"
        expected = f"b at {endpoint}: a loopback address, but nodes run on other hosts: host-a"
        assert failed["found"] == expected
        assert "`advertise` of b" in failed["advice"]


def test_a_smaller_mtu_on_the_way(make_network: MakeNetwork) -> None:
    """Small frames pass, as those of a handshake and of a request are."""
    network = make_network("a", "b", "c")
    a, *_ = [network.node(name) for name in "abc"]
    (works,) = examine(network, a, alive=3, code=0)
    assert "3 of 3 (connections: 6)" in works["found"]
    network.set("a", "b", mtu=1400)
    stuck_there = "it answers, but frames of 64.0 KiB do not arrive there"
    stuck_back = "it answers, but its frames of 64.0 KiB do not arrive"
    of_a, of_b, works = examine(network, a, alive=3, code=1)
    assert of_a["found"].endswith(f": {stuck_back}, dialled by b; reached by c")
    assert of_b["found"].endswith(f": {stuck_there}, dialled by a; reached by c")
    for check in (of_a, of_b):
        assert check["verdict"] == "fail"
        assert "ip link set dev" in check["advice"]
    assert "3 of 3 (connections: 4)" in works["found"]
    network.set("a", "b", mtu=1500)
    examine(network, a, alive=3, code=0)


def test_two_other_hosts_that_do_not_reach_each_other(make_network: MakeNetwork) -> None:
    network = make_network("a", "b", "c")
    a, b, c = [network.node(name) for name in "abc"]
    wait_until(lambda: all(one.stats()["nodes_alive"] == 3 for one in (a, b, c)), 10.0)
    with network.cut("b", "c"):
        of_b, of_c, works = examine(network, a, alive=3, code=1)
    for check, name, other in ((of_b, "b", "c"), (of_c, "c", "b")):
        assert check["verdict"] == "fail"
        assert check["found"].startswith(f"{name} at ")
        assert f"not dialled by {other}; reached by a" in check["found"]
        assert f"the ports of {name} and {other}" in check["advice"]
    assert "3 of 3 (connections: 4)" in works["found"]
    examine(network, a, alive=3, code=0)
