"""The node: builds its parts, runs the loop until it is stopped, and closes them in order.

This is the map of the folder. An arrow is a call; in brackets the thread of what is called, if it
is not the loop's. The loop's thread is the process's main thread. `counters` and `loop` are used
by many and not drawn, nor is `connection` to other nodes.

    clients ─► connection ─► server                 a call or a task for each request
      server ─► arena                               pins
      server ─► insert ─► arena                     insert; copies above 512 KiB [lb-copy]
               ├─► handoffs                         hand-offs that wait for space
               ├─► announcements ─► takes           ownership of a hand-off; queries the other owner
               ├─► claims ─► read                   a stored output ends its claim
               └─► read, locate                     readers of the key continue
      server ─► read ─► arena                       select and has_caches of what is here
               ├─► locate ─► store                  the holders of an absent key, and
               │                                    the wait until a node has it
               └─► transfer ─► other nodes          its bytes [lb-fetch]
                                └─► arena           where they land
      server ─► prefetch ─► read, claims            many keys, an event for each
               └─► devices                          transfers from device to device
      server ─► takes ─► handoffs ─► arena          drop_select of an item of this node
               ├─► locate, transfer                 of another node's
               └─► other nodes                      its owner
      server ─► claims ─► store                     claims, over the mirror's connections if any
      server, claims, announcements ─► registrar    marks keys as changed (dirty_set); so do arena,
                                                    devices and peers, through node
      node ─► membership, locate, takes, http       ticks, 4 times a second

      registrar ─► membership, publisher ─► store    heartbeats, records, statistics
               ├─► publisher ─► announcements       the store's replies on hand-offs
               └─► devices                          other nodes' device pools

    other nodes ─► peers ─► arena                   sends tensors [lb-send]
                    └─► handoffs                    takers of other nodes
    Prometheus, probes, browsers ─► the dashboard's process, which `http` keeps running
                     ├─► server                     /metrics and /healthz, by a message
                     └─► store                      the page

`lb-open` (in `storage`) opens the store and ends; `lb-blocked` (in `loop`) runs at debug level.
`lb-populate` (in `shm/memory.py`) faults the arena in and ends.
"""

import asyncio
import faulthandler
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.claims import Arbiter, Claims, HeldClaims
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Lanes, Pools
from lookup_buffer.node.handoffs import Askers, Handoffs
from lookup_buffer.node.http import HttpProcess
from lookup_buffer.node.insert import Inserts
from lookup_buffer.node.locate import LOOK_AGAIN_SECONDS, POLL_SECONDS, Locator, Waiting
from lookup_buffer.node.loop import BlockedLog, NodeLoop
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.peers import PeerServer
from lookup_buffer.node.publisher import Report
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.server import Server
from lookup_buffer.node.storage import Storage
from lookup_buffer.node.takes import Owners, Takes
from lookup_buffer.node.transfer import Fetcher
from lookup_buffer.runtime import LOG_FORMAT
from lookup_buffer.shm.index import RemoteIndex
from lookup_buffer.times import DEATH_CHECK_SECONDS
from store import GoneReason, StoreError

if TYPE_CHECKING:
    from store.telemetry import Telemetry

SWITCH_SECONDS = 0.0005
"""How long another Python thread may keep the GIL from the loop; a tenth of CPython's default."""
GARBAGE_THRESHOLDS = (2_000, 10, 1_000)
"""A full collection visits everything that the mirror caches: 0.3 s at 200,000 keys, in which no
request is answered. CPython's own thresholds caused eight of them while the mirror filled, these
none."""
IDLE_CHECK_SECONDS = 1.0
END_SECONDS = 20.0
"""After a request to stop, a node ends within this time, sooner than a supervisor kills it (30 s in
Kubernetes). Its parts stop within 12 s and the store's timeout; one that does not is a bug, and
then the stack of each thread goes to stderr, with exit code 1."""
FIRST_BYTES = 64 << 20
"""Faulted in before the node reports ready; the rest follows in the background."""
_log = logging.getLogger(__name__)


class Node:
    """One node. `run` blocks the main thread until SIGTERM, SIGINT, `stop` or idleness."""

    def __init__(self, config: BufferConfig, *, ends_when_idle: bool) -> None:
        """Raises ConfigError if a configured address, file, package or provider cannot be used."""
        config.store_access().check_files()
        self._config = config
        self._ends_when_idle = ends_when_idle
        self._counters = Counters()
        self._loop = NodeLoop(self._counters.loop_blocked_seconds.observe)
        self._blocked_log = BlockedLog(self._loop)
        self._arena = Arena(config.capacity_bytes, self._changed)
        self._pools = Pools(self._arena)
        token = config.token.get_secret_value() if config.token else None
        self._handoffs = handoffs = Handoffs(
            self._loop, self._arena, self._counters, config.handoff_lease_seconds
        )
        self._askers = Askers(self._loop, handoffs, self._counters)
        self._peers = PeerServer(
            self._loop, self._arena, self._counters, token, self._missed, self._askers
        )
        self._held_claims = HeldClaims(self._loop)
        self._identity = self._listen_to_peers()
        self._http = None if config.http_listen is None else HttpProcess(config.http_listen)
        self._storage = Storage(config, self._identity.node)
        self._telemetry = self._make_telemetry() if config.store_opentelemetry else None
        self._directory = directory = Directory(self._identity.node)
        self._remote_index = RemoteIndex()
        self._lacks_mirror = not self._storage.has_mirror()
        mirrored = config.mirror and not self._lacks_mirror
        self._locator = Locator(self._loop, self._storage, directory, self._remote_index, mirrored)
        self._fetcher = Fetcher(self._loop, self._arena, self._counters, token)
        self._registrar = Registrar(
            self._loop,
            self._storage,
            self._arena,
            directory,
            self._identity,
            self._counters,
            config.record_ttl_seconds,
            self._held_claims,
            self._pools,
            self._report,
        )
        self._owners = Owners(self._loop, directory, token)
        self._announcements = Announcements(
            self._loop, self._arena, handoffs, self._locator, directory, self._owners,
            self._identity, self._registrar, self._counters,
        )  # fmt: skip
        self._server = self._make_server(directory)

    def _make_server(self, directory: Directory) -> Server:
        loop, arena, handoffs = self._loop, self._arena, self._handoffs
        pauses = (LOOK_AGAIN_SECONDS,) if self._locator.mirrored else POLL_SECONDS
        waiting = Waiting(loop, self._locator, pauses)
        boot = self._identity.boot
        reads = Reads(loop, arena, self._locator, self._fetcher, waiting, self._counters, boot)
        arbiter = Arbiter(loop, self._locator, arena)
        self._claims = Claims(
            loop, self._held_claims, arbiter, self._identity, arena, waiting, reads,
            self._registrar, self._counters,
        )  # fmt: skip
        self._inserts = Inserts(
            loop, arena, self._counters, waiting, handoffs, self._claims, self._announcements,
            reads.arrived,
        )  # fmt: skip
        takes = Takes(
            loop, arena, handoffs, self._owners, self._locator, directory, self._identity,
            waiting, self._fetcher,
        )  # fmt: skip
        return Server(
            loop=loop,
            identity=self._identity,
            arena=arena,
            remote_index=self._remote_index,
            reads=reads,
            inserts=self._inserts,
            takes=takes,
            claims=self._claims,
            lanes=Lanes(loop, boot, self._locator, self._counters, self._pools),
            registrar=self._registrar,
            counters=self._counters,
            expects=self._config.expectations(),
        )

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def http_address(self) -> str | None:
        """The URL of the dashboard and `/metrics`; None if `http_listen` is not set."""
        return None if self._http is None else self._http.address

    def run(self, socket_path: Path, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until stopped. The caller holds the lock on the runtime directory.

        `on_ready` is called once clients are answered.

        Raises:
            ConfigError: the node's id belongs to another node; this node's items are lost.
        """
        logging.basicConfig(format=LOG_FORMAT, level=self._config.log_level.upper())
        if self._config.mirror and self._lacks_mirror:
            _log.info("this store has no mirror: it is called for each look-up")
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        first = min(FIRST_BYTES, self._config.capacity_bytes)
        self._arena.memory.populate(0, first)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._loop.stop)
        if self._http is not None:
            self._http.start(self._identity.node, socket_path, self._config)
        self._server.listen(socket_path)  # may fail, so before any thread is started
        self._peers.start(self._identity, self._directory)
        self._locator.start()
        self._registrar.start()
        if self._telemetry is not None:
            self._telemetry.start()
        self._arena.memory.populate_in_background(skip_bytes=first)
        self._loop.call_soon(on_ready)
        self._blocked_log.start()
        self._check_deaths()
        if self._ends_when_idle:
            self._loop.call_later(IDLE_CHECK_SECONDS, self._check_idle)
        try:
            self._loop.run_forever()
        finally:
            socket_path.unlink(missing_ok=True)
            faulthandler.dump_traceback_later(END_SECONDS, exit=True)
            self._blocked_log.close()
            self._close()
        if self._registrar.fault is not None:
            raise self._registrar.fault

    def _check_deaths(self) -> None:
        self._directory.tick()
        self._locator.tick()
        self._owners.tick()
        self._fetcher.tick()
        self._peers.tick()
        if self._http is not None:
            self._http.tick()
        self._loop.call_later(DEATH_CHECK_SECONDS, self._check_deaths)

    def _check_idle(self) -> None:
        if self._server.idle_seconds() > self._config.idle_exit_seconds:
            self._loop.stop()
        else:
            self._loop.call_later(IDLE_CHECK_SECONDS, self._check_idle)

    def _changed(self, address: QualifiedKey, reason: str) -> None:
        if reason and self._pools.offers(address):
            self._loop.call_soon(self._pools.gone, address)
        self._registrar.changed(address, reason)

    def _missed(self, address: QualifiedKey) -> None:
        """The store names this node for an item that it does not have: write what it has."""
        self._registrar.changed(address, GoneReason.STALE)

    def _report(self, reports: Sequence[Report]) -> None:
        self._loop.call_soon(self._announcements.handle_reports, reports)

    def _listen_to_peers(self) -> Identity:
        config = self._config
        try:
            endpoint = self._peers.listen(config.listen)
        except OSError as error:
            raise ConfigError(
                f"setting 'listen' is {config.listen!r}: {error.strerror}; "
                "allowed: a free address of this host"
            ) from error
        return Identity.create(config.node_id, config.advertise or endpoint)

    def _make_telemetry(self) -> "Telemetry":
        from store.telemetry import Telemetry  # imports redis-py

        try:
            return Telemetry(self._identity.node)
        except StoreError as error:
            raise ConfigError(f"setting 'store_opentelemetry' is true, and {error}") from error

    def _finish(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run `coroutine` to its end on the stopped loop; a `stop` that comes late does not end
        it."""
        task = self._loop.create_task(coroutine)
        while not task.done():
            with suppress(RuntimeError):
                self._loop.run_until_complete(task)

    def _end_tasks(self) -> None:
        """Let what was cancelled run to its end."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._finish(asyncio.wait(tasks))

    def _close(self) -> None:
        self._finish(self._server.close())
        self._askers.close()
        self._owners.close()
        self._finish(self._claims.arbiter.close())
        self._finish(self._registrar.close())
        if self._http is not None:
            self._http.close()
        self._peers.close()
        self._fetcher.close()
        self._inserts.close()
        self._locator.close()
        self._finish(self._storage.close())
        if self._telemetry is not None:
            self._telemetry.close()
        self._end_tasks()
        self._loop.close()
        self._arena.close()
        self._remote_index.close()
