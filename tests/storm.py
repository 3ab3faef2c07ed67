"""Faults, one after the other, done to two hosts while their engines answer."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from engines import SIZE
from nodes import NodeProcess
from servers import command, flush, frozen
from two_hosts import TwoHosts

Fault = Callable[[], None]
CALM_SECONDS = (1.0, 2.0)
"""From the end of a fault to the next."""
AWAY_SECONDS = (0.1, 1.0)
"""How long what was killed is away."""
STOPPED_SECONDS = (1.0, 3.0)


class Storm:
    """Every fault leaves all processes running; what it broke need not be whole again."""

    def __init__(self, hosts: TwoHosts, chance: random.Random) -> None:
        self._hosts = hosts
        self._chance = chance
        self.done: Counter[str] = Counter()
        """How often each fault was done."""
        self._faults: dict[str, Fault] = {
            "node a killed": lambda: self._kill(hosts.a),
            "node b killed": lambda: self._kill(hosts.b),
            "node a stopped": lambda: self._stop(hosts.a),
            "node b stopped": lambda: self._stop(hosts.b),
            "Redis stopped": self._stop_redis,
            "Redis flushed": lambda: flush(hosts.server.url),
            "Redis killed": self._kill_redis,
            "connections to Redis cut": self._cut_clients,
            "mirrors cut off from Redis": self._cut_mirrors,
            "connections between nodes cut": hosts.relay.cut,
            "a transfer cut": lambda: hosts.relay.cut_after(SIZE.nbytes_per_image // 2),
        }
        self._due: list[str] = []

    def strike(self) -> str:
        """One fault, and the calm after it; all have their turn before one comes again."""
        if not self._due:
            self._due = list(self._faults)
            self._chance.shuffle(self._due)
        name = self._due.pop()
        self._faults[name]()
        self.done[name] += 1
        time.sleep(self._chance.uniform(*CALM_SECONDS))
        return name

    def _kill(self, node: NodeProcess) -> None:
        node.kill()
        time.sleep(self._chance.uniform(*AWAY_SECONDS))
        node.start()

    def _stop(self, node: NodeProcess) -> None:
        with node.frozen():
            time.sleep(self._chance.uniform(*STOPPED_SECONDS))

    def _stop_redis(self) -> None:
        with frozen(self._hosts.server):
            time.sleep(self._chance.uniform(*STOPPED_SECONDS))

    def _kill_redis(self) -> None:
        os.kill(self._hosts.server.pid, signal.SIGKILL)
        time.sleep(self._chance.uniform(*AWAY_SECONDS))
        self._hosts.restart_server()

    def _cut_clients(self) -> None:
        command(self._hosts.server.url, "CLIENT", "KILL", "TYPE", "normal")

    def _cut_mirrors(self) -> None:
        """Only the connections that are told of changes."""
        for client in command(self._hosts.server.url, "CLIENT", "LIST").decode().splitlines():
            fields = dict(field.split("=", 1) for field in client.split())
            if "t" in fields["flags"]:
                command(self._hosts.server.url, "CLIENT", "KILL", "ID", fields["id"])
