"""The node's process: builds its parts, runs the loop until it is stopped, closes them in order.

Started by `runtime.py` (for an engine), with the settings as JSON on standard input, and by
`lookup-buffer serve`. With `--detach` it first leaves its parent's process tree, see `runtime`.
Exit codes: 0 stopped or idle; 1 a part did not stop within END_SECONDS; 2 the configuration is
wrong, or another node already serves this directory.

This is the map of the folder. An arrow is a call; in brackets the thread of what is called, if it
is not the loop's. The loop's thread is the process's main thread. `counters` is used by
many and not drawn, nor is `connection` to other nodes.

    clients ─► connection ─► server                 a call or a task for each request,
                                                    in its turn (turns)
      server ─► arena                               pins
      server ─► closer                              descriptors that clients passed [lb-close]
               └─► client_process                   whether a client's process has ended
      server ─► insert ─► arena                     insert; copies above 512 KiB [lb-copy]
               ├─► staging                          copies from clients' memory
               ├─► handoffs ─► turns, arena         hand-offs that wait for space
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
      server ─► reachability ─► other nodes         whether they reach each other, for `doctor`
      server ─► claims ─► store                     claims, over the mirror's connections if any
      server, claims, announcements ─► registrar    marks keys as changed (dirty_set); so do arena,
                                                    devices and peers, through main
      main ─► membership, locate, takes, peers      ticks, 4 times a second

      registrar ─► membership ─► store              heartbeats, and who is alive
               ├─► invalidations ─► arena           namespaces whose items are dropped
               ├─► expiry ─► arena                  items whose time to live is over
               ├─► store                            records, statistics
               ├─► announcements                    the store's replies on hand-offs
               └─► devices                          other nodes' device pools

    other nodes ─► peers ─► arena                   sends tensors [lb-send]
                    ├─► handoffs                    takers of other nodes
                    └─► reachability ─► other nodes one asks to be dialled back
    Prometheus, probes, browsers ─► the dashboard's process, which `http` keeps running
                     ├─► server                     /metrics and /healthz, by a message
                     └─► store                      the page

`lb-open` (in `storage`) opens the store and ends; `lb-blocked` (here) runs at debug level.
`lb-populate` (in `shm/memory.py`) faults the arena in and ends.
"""

import asyncio
import faulthandler
import gc
import json
import logging
import os
import resource
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import ConfigError, NodeUnavailable
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.claims import Arbiter, Claims
from lookup_buffer.node.connection import Tasks
from lookup_buffer.node.counters import Counters, Histogram
from lookup_buffer.node.devices import Lanes, Pools
from lookup_buffer.node.handoffs import Askers, Handoffs
from lookup_buffer.node.held_claims import HeldClaims
from lookup_buffer.node.http import HttpProcess
from lookup_buffer.node.insert import Inserts
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import LOOK_AGAIN_SECONDS, POLL_SECONDS, Locator, Waiting
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.peers import PeerServer
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.server import Server
from lookup_buffer.node.storage import Storage
from lookup_buffer.node.takes import Owners, Takes
from lookup_buffer.node.transfer import Fetcher
from lookup_buffer.protocol.tls import Tls
from lookup_buffer.runtime import escaped, lock, start_log
from lookup_buffer.shm.index import IS_ORDERED, WITHOUT_ORDER, RemoteIndex
from lookup_buffer.times import DEATH_CHECK_SECONDS
from store import StoreError

if TYPE_CHECKING:
    from store.telemetry import Telemetry

SWITCH_SECONDS: Final = 0.0005
"""How long another Python thread may keep the GIL from the loop; a tenth of CPython's default."""
GARBAGE_THRESHOLDS: Final = (2_000, 10, 1_000)
"""A full collection visits everything that the mirror caches: 0.3 s at 200,000 keys, in which no
request is answered. CPython's own thresholds caused eight of them while the mirror filled, these
none."""
BLOCKED_SECONDS: Final = 0.02
LOCK_SECONDS: Final = 5.0
"""How long to wait for the lock on the directory. A node that is shutting down mostly releases it
within this time; it may take END_SECONDS, and then the start fails."""
END_SECONDS: Final = 20.0
"""After a request to stop, a node ends within this time, sooner than a supervisor kills it (25 s by
the deployment files). Its parts stop within 12 s and the store's timeout; one that does not is a
bug, and then the stack of each thread goes to stderr, with exit code 1."""
FIRST_BYTES: Final = 64 << 20
"""Faulted in before the node reports ready; the rest follows in the background."""
DESCRIPTORS: Final = 65_536
"""A connection of another node takes two, and the usual limit of 1,024 is for programs that use
`select`."""
_log = logging.getLogger(__name__)


class TimedSelector(selectors.DefaultSelector):
    """The selector of a loop. Measures how long each iteration blocks the loop, from the end of one
    `select` to the next: no other request is answered meanwhile.

    Those longer than BLOCKED_SECONDS are counted and, if debug messages are logged, logged: when
    they are over, and with the stack while they last.
    """

    def __init__(self, blocked: Histogram) -> None:
        super().__init__()
        self._blocked = blocked
        self._busy_since: float | None = None
        """None while the loop waits for events, by `time.monotonic`."""
        self._closing = threading.Event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._busy_since is not None:
            seconds = time.monotonic() - self._busy_since
            self._busy_since = None
            if seconds > BLOCKED_SECONDS:
                self._blocked.observe(seconds)
                _log.debug("the loop was blocked for %.3f s", seconds)
        events = super().select(timeout)
        self._busy_since = time.monotonic()
        return events

    def log_stacks(self) -> None:
        """Log the stack once for each time that the loop, which runs on this thread, is blocked; on
        the thread `lb-blocked`, until `close`."""
        if _log.isEnabledFor(logging.DEBUG):
            threading.Thread(
                target=self._watch, args=(threading.get_ident(),), name="lb-blocked", daemon=True
            ).start()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def _watch(self, thread_id: int) -> None:
        logged = None
        while not self._closing.wait(BLOCKED_SECONDS / 2):
            since = self._busy_since
            if since is None or since == logged or time.monotonic() - since < BLOCKED_SECONDS:
                continue
            frame = sys._current_frames().get(thread_id)
            if self._busy_since == since and frame is not None:
                logged = since
                places = " < ".join(
                    f"{one.f_code.co_filename}:{line} {one.f_code.co_name}"
                    for one, line in traceback.walk_stack(frame)
                )
                _log.debug("the loop is blocked in %s", places)


class Node:
    """One node. `run` blocks the main thread until SIGTERM, SIGINT or idleness."""

    def __init__(self, config: BufferConfig, *, ends_when_idle: bool) -> None:
        """Raises ConfigError if a configured address, file, package or provider cannot be used."""
        config.check_files()
        self._config = config
        self._ends_when_idle = ends_when_idle
        self._tasks = Tasks()
        """The dashboard's process, and the ticks."""
        counters = Counters()
        self._selector = TimedSelector(counters.loop_blocked_seconds)
        self._loop = loop = asyncio.SelectorEventLoop(self._selector)
        self._arena = arena = Arena(config.capacity_bytes, self._changed)
        self._pools = Pools(arena)
        self._credentials = credentials = _credentials(config)
        handoffs = Handoffs(loop, arena, counters, config.handoff_lease_seconds)
        self._askers = Askers(loop, handoffs, counters)
        self._peers = PeerServer(loop, arena, counters, credentials, self._missed, self._askers)
        held_claims = HeldClaims(loop)
        self.identity = identity = self._listen_to_peers()
        self._http = None if config.http_listen is None else HttpProcess(config.http_listen)
        self._storage = Storage(config, identity.node)
        self._telemetry = self._make_telemetry() if config.store_opentelemetry else None
        self._directory = directory = Directory(identity.node)
        self._remote_index = RemoteIndex()
        self._lacks_mirror = not self._storage.has_mirror()
        mirrored = config.mirrored and not self._lacks_mirror
        self._locator = Locator(loop, self._storage, directory, self._remote_index, mirrored)
        self._reachability = Reachability(loop, identity, directory, credentials, counters)
        self._fetcher = Fetcher(loop, arena, counters, credentials)
        self._registrar = Registrar(
            loop, self._storage, arena, directory, identity, counters, config.record_ttl_seconds,
            held_claims, self._pools,
            lambda reports: self._announcements.handle_reports(reports), config.read_only,
        )  # fmt: skip
        self._owners = Owners(loop, directory, credentials)
        self._announcements = Announcements(
            loop, arena, handoffs, self._locator, directory, self._owners, identity,
            self._registrar, counters,
        )  # fmt: skip
        pauses = (LOOK_AGAIN_SECONDS,) if mirrored else POLL_SECONDS
        waiting = Waiting(loop, self._locator, pauses)
        reads = Reads(loop, arena, self._locator, self._fetcher, waiting, counters, identity.boot)
        self._arbiter = Arbiter(loop, self._locator, arena)
        claims = Claims(
            loop, held_claims, self._arbiter, identity, arena, waiting, reads, self._registrar,
            counters, config.read_only,
        )  # fmt: skip
        self._inserts = Inserts(
            loop, arena, counters, waiting, handoffs, claims, self._announcements, reads
        )
        takes = Takes(
            loop, arena, handoffs, self._owners, self._locator, directory, identity, waiting,
            self._fetcher,
        )  # fmt: skip
        lanes = Lanes(loop, identity.boot, self._locator, counters, self._pools)
        self._server = Server(
            loop, identity, arena, self._remote_index, reads, self._inserts, takes, claims, lanes,
            self._registrar, self._reachability, counters, config.expectations(),
            config.read_only,
        )  # fmt: skip

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
        start_log(self._config.log_level)
        _allow_descriptors()
        if not IS_ORDERED:
            _log.warning("lookup buffer: %s", WITHOUT_ORDER)
        if self._config.mirrored and self._lacks_mirror:
            _log.info("this store has no mirror: it is called for each look-up")
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        first = min(FIRST_BYTES, self._config.capacity_bytes)
        self._arena.memory.populate(0, first)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._loop.stop)
        if self._http is not None:
            http = self._http.run(self.identity.node, socket_path, self._config)
            self._tasks.own(self._loop.create_task(http))  # its first step is before `on_ready`
        self._server.listen(socket_path)  # may fail, so before any thread is started
        self._start()
        self._arena.memory.populate_in_background(skip_bytes=first)
        self._loop.call_soon(on_ready)
        self._selector.log_stacks()
        try:
            self._loop.run_forever()
        finally:
            self._server.remove_socket(socket_path)
            with suppress(RuntimeError):  # no memory for its thread: then nothing bounds the end
                faulthandler.dump_traceback_later(END_SECONDS, exit=True)
            closing = self._loop.create_task(self._close())
            while not closing.done():
                with suppress(RuntimeError):  # a `stop` that comes late does not end it
                    self._loop.run_until_complete(closing)
            closing.result()
            self._loop.close()
            self._arena.close()
            self._remote_index.close()
        if self._registrar.fault is not None:
            raise self._registrar.fault

    def _start(self) -> None:
        self._peers.start(self.identity, self._directory, self._reachability)
        self._locator.start()
        self._registrar.start()
        if self._telemetry is not None:
            self._telemetry.start()
        self._tasks.own(self._loop.create_task(self._tick()))

    async def _tick(self) -> None:
        """Check for dead nodes, for what is idle here, for certificates that count no more, and for
        a node that is idle as a whole."""
        connections = (self._owners, self._fetcher, self._peers)
        parts = (self._credentials, self._directory, self._locator, *connections)
        while True:
            for part in parts:
                try:
                    part.tick()
                except Exception:  # noqa: BLE001 -- the others need theirs
                    _log.exception("a check failed; this is a bug, please report it")
            if self._ends_when_idle and (
                self._server.idle_seconds() > self._config.idle_exit_seconds
            ):
                self._loop.stop()
            await asyncio.sleep(DEATH_CHECK_SECONDS)

    def _changed(self, address: QualifiedKey, reason: str) -> None:
        if reason and self._pools.offers(address):
            self._loop.call_soon(self._pools.gone, address)
        self._registrar.changed(address, reason)

    def _missed(self, address: QualifiedKey) -> None:
        self._registrar.missed(address)

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
            return Telemetry(self.identity.node)
        except StoreError as error:
            raise ConfigError(f"setting 'store_opentelemetry' is true, and {error}") from error

    async def _close(self) -> None:
        """Close all parts, and let each task that was cancelled run to its end."""
        await self._server.close()
        self._askers.close()
        self._reachability.close()
        self._owners.close()
        await self._arbiter.close()
        await self._registrar.close()
        self._tasks.cancel()
        self._peers.close()
        self._fetcher.close()
        self._inserts.close()
        self._locator.close()
        await self._storage.close()
        if self._telemetry is not None:
            self._telemetry.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def serve(config: BufferConfig, *, ends_when_idle: bool) -> int:
    """Run the node of the configured directory until it is stopped. Returns the exit code."""
    directory = config.runtime_directory()
    try:
        with lock(directory / "node.lock", timeout=LOCK_SECONDS):
            Node(config, ends_when_idle=ends_when_idle).run(config.socket_path())
    except (ConfigError, NodeUnavailable) as error:
        _tell(error)
        return 2
    return 0


def _tell(error: Exception) -> None:
    """In one line of the log, whatever the error quotes: the store has texts of others."""
    sys.stderr.write(f"lookup-buffer: {escaped(str(error))}\n")


def _credentials(config: BufferConfig) -> Credentials:
    """Raises ConfigError: a file of TLS or of the token cannot be used."""
    files, node = config.tls_files(), config.node_id
    tls = Tls(files, node, read_only=config.read_only) if files and node else None
    return Credentials(config.read_peer_token(), tls)


def _allow_descriptors() -> None:
    """As many as this process may allow itself, up to DESCRIPTORS."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if resource.RLIM_INFINITY != allowed < wanted:
        with suppress(ValueError, OSError):  # a container's rules
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None  # no cause is chained: the text may hold secrets
    if not isinstance(settings, dict):
        raise ConfigError("standard input is not a JSON object of settings")
    return settings


def main() -> None:
    detach = "--detach" in sys.argv[1:]
    try:
        config = BufferConfig.of(_settings(sys.stdin.read()))
        config.read_peer_token()  # here whoever starts it gets the exit code at once
    except ConfigError as error:
        _tell(error)
        sys.exit(2)
    if detach and os.fork():
        os._exit(0)  # vLLM kills its whole process tree; an orphan is not in it
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # vLLM binds its workers to one core
    os.chdir("/")
    sys.exit(serve(config, ends_when_idle=detach))


if __name__ == "__main__":
    main()
