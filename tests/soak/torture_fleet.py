"""A fleet under faults: nodes, clients and dashboards that work while they are killed and frozen.

The harness gives each client one order at a time and hears what became of it. So it knows what was
acknowledged, when each order began, and which clients are silent. Everything is named by numbers:
the bytes under a number follow from it, in any process.

When the faults are over, all that was acknowledged is read again, at its holder and at another
node, and compared byte by byte. It may be missing only where its holder died since.
"""

import os
import random
import signal
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from clocks import environment
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.errors import LookupBufferError, MissingTensor, NodeUnavailable
from lookup_buffer.key import TensorKey
from nodes import MIB, ClientProcess, NodeProcess, at_rest, tensor_of, wait_until
from observing import get
from patience import scaled
from torture_totals import Finding, Totals

NAMESPACE = "torture"
SIZES = (0, 1, 4_096, 70_000, 600_000)
"""Below and above what a node copies on its loop."""
BUDGET_BYTES = 6 * MIB
"""Of one round, so that copies of all of it fit into each arena that is not to be full."""
FILL_BYTES = 2 * MIB
READ_SECONDS, TAKE_SECONDS, HAND_SECONDS = 2.0, 3.0, 5.0
START_SECONDS = 30.0
HANG_SECONDS = 30.0
"""An order that takes longer on an idle machine hangs: each has a timeout of seconds."""
REST_SECONDS = 0.2
FAULT_EVERY_SECONDS = (0.1, 0.8)
VISIBLE_SECONDS = 15.0
"""After the faults: a store that lost its data has all records again."""
MEMORY_GROWTH_MAX = 24 * MIB
LISTEN = "0A"
"""The state of a socket in /proc/net/tcp."""
LINKS_MAX = 32
"""Open files of a node for its connections to one other: in each direction up to four for tensors
and a few for hand-offs; what it accepts for tensors has two files."""

WITHOUT_MEMORY = ("MemoryError", "can't start new thread", "Cannot allocate memory")

WORK = "from torture_fleet import work; work(buffer, send, receive)"
READY = "ready"
Undo = Callable[[], None]
Fault = Callable[["Fleet"], tuple[float, Undo] | None]
"""Does something bad. Returns after how many seconds to undo it, and how; None if that is no
matter of the harness, or if nothing was there to be struck."""


def key_of(kind: str, number: int) -> TensorKey:
    if kind in ("hand", "take"):
        return TensorKey(NAMESPACE, request_id=str(number))
    return TensorKey(f"{'fill' if kind == 'fill' else 'shared'}-{number}")


def nbytes_of(kind: str, number: int) -> int:
    return FILL_BYTES if kind == "fill" else SIZES[number % len(SIZES)]


def value_of(kind: str, number: int) -> torch.Tensor:
    return tensor_of(str(number), nbytes_of(kind, number))


def is_value(kind: str, number: int, tensor: torch.Tensor | None) -> bool:
    return tensor is not None and torch.equal(tensor, value_of(kind, number))


def work(buffer: LookupBuffer, send: Callable[[Any], None], receive: Callable[[], Any]) -> None:
    """What a client process does: orders (kind, number), each answered by (when it began, what
    became of it)."""
    send(READY)
    while True:
        try:
            kind, number = receive()
        except EOFError:  # the harness is done
            return
        began = time.monotonic()
        try:
            outcome = _done(buffer, kind, number)
        except LookupBufferError as error:
            outcome = type(error).__name__
        except Exception:
            outcome = f"raised {traceback.format_exc()}"
        send((began, outcome))


def _done(buffer: LookupBuffer, kind: str, number: int) -> str:
    key = key_of(kind, number)
    if kind in ("insert", "fill", "hand"):
        buffer.insert(key, value_of(kind, number), timeout=HAND_SECONDS)
        return "stored"
    if kind == "claim":
        buffer.claim(key, lease_seconds=1.0)
        buffer.release_claim(key)
        return "claimed"
    if kind == "take":
        tensor = buffer.drop_select(key, timeout=TAKE_SECONDS)
    else:
        tensor = buffer.select(key, timeout=READ_SECONDS)
    return "equal" if is_value(kind, number, tensor) else "wrong bytes"


@dataclass(eq=False)
class Client:
    """A process, and its order."""

    process: ClientProcess
    node: NodeProcess
    order: tuple[str, int] | None = None
    since: float = field(default_factory=time.monotonic)
    ready: bool = False
    frozen: bool = False
    rests: float = 0.0
    """Until then it gets no order: it has lost its node."""


@dataclass
class Publication:
    """Of a shared item or a hand-off that a node acknowledged."""

    kind: str
    number: int
    holder: NodeProcess
    began: float
    """When its insert was called, by the monotonic clock: a later death takes it along."""
    won: int = 0
    uncertain: bool = False
    """Somebody began to take this hand-off, and we do not know whether it was given out."""


class Fleet:
    """`nodes` run already. `store_faults` and others come from who made them."""

    def __init__(
        self,
        nodes: Sequence[NodeProcess],
        name: str,
        seed: int,
        *,
        fills: bool = False,
        environments: Mapping[NodeProcess, Mapping[str, str]] | None = None,
    ) -> None:
        self.nodes = list(nodes)
        self.name, self.seed = name, seed
        self.chance = random.Random(f"{name} {seed}")
        self.totals = Totals()
        self.clients: list[Client] = []
        self.limited: set[NodeProcess] = set()
        """Nodes at the limit of their memory, which may end there."""
        self.starved: set[NodeProcess] = set()
        """Those that were, since they started: they may hang, see docs/torture.md."""
        self.was_starved: set[NodeProcess] = set()
        self.soft_limits: dict[tuple[int, int], int] = {}
        """What a process had before it was limited, by its pid and the kind of limit."""
        self._fills = fills
        self._environments = environments or {}
        self._published: dict[tuple[str, int], Publication] = {}
        self._deaths: dict[NodeProcess, list[float]] = defaultdict(list)
        self._down: set[NodeProcess] = set()
        self._due: list[tuple[float, Undo]] = []
        self._numbers = iter(range(1, 1 << 40))
        self._inserted_bytes = 0
        self._files = {node: node.open_files() for node in self.nodes}

    # -- the run

    def run(self, seconds: float, faults: Mapping[str, Fault], clients_per_node: int = 2) -> None:
        """Work and faults for so long; then all is whole again, and checked."""
        for node in self.nodes * clients_per_node:
            self._add_client(node)
        wait_until(self._all_ready, START_SECONDS, "the clients attach")
        until = time.monotonic() + seconds
        turns: deque[str] = deque()
        next_fault = time.monotonic()
        memory = _Memory(self.nodes, until - 0.7 * seconds)
        while (now := time.monotonic()) < until:
            self._step()
            memory.look(now, self._deaths)
            if now >= next_fault and faults:
                if not turns:
                    turns.extend(self.chance.sample(list(faults), len(faults)))
                self._strike(turns[0], faults[turns.popleft()])
                next_fault = time.monotonic() + self.chance.uniform(*FAULT_EVERY_SECONDS)
        self._mend()
        self._drain()
        self._verify()
        self._rest()
        for grown in memory.growths(self._deaths):
            self.totals.peak("memory growth of a node that lived, MiB", grown / MIB)
            if grown > MEMORY_GROWTH_MAX:
                self.found("memory", f"a node grew by {grown / MIB:.1f} MiB in {seconds:.0f} s")

    def end(self) -> None:
        """Idempotent. Everything that was struck goes on, and no client is left."""
        for _, undo in self._due:
            with suppress(Exception):
                undo()
        self._due = []
        for client in self.clients:
            _signal(client.process.pid, signal.SIGCONT)
            client.process.__exit__()
        self.clients = []

    def found(self, kind: str, text: str) -> None:
        print(f"FOUND in {self.name}, seed {self.seed}: {kind}: {text}", flush=True)
        self.totals.findings.append(Finding(kind, self.name, self.seed, text))

    @staticmethod
    def now() -> float:
        """What `Client.since` is compared with."""
        return time.monotonic()

    def later(self, seconds: float, undo: Undo) -> None:
        self._due.append((time.monotonic() + seconds, undo))

    def is_up(self, node: NodeProcess) -> bool:
        return node not in self._down and node.alive()

    def kill_node(self, node: NodeProcess) -> Undo:
        self._down.add(node)
        self._deaths[node].append(time.monotonic())
        node.kill()
        self._deaths[node].append(time.monotonic())
        return lambda: self._restart(node)

    def _restart(self, node: NodeProcess) -> None:
        with environment(self._environments.get(node, {})):
            node.start()
        self._down.discard(node)
        self.limited.discard(node)
        self.starved.discard(node)

    def kill_client(self, client: Client) -> None:
        self._lost_client(client)
        client.process.kill()
        client.process.__exit__()

    def _lost_client(self, client: Client) -> None:
        self.clients.remove(client)
        if client.order is not None and (item := self._taken_by(client.order)):
            item.uncertain = True
        self.later(0.1, lambda: self._add_client(client.node))

    def _add_client(self, node: NodeProcess) -> None:
        if not self.is_up(node):
            self.later(0.5, lambda: self._add_client(node))
            return
        process = ClientProcess(node.config, WORK, namespace=NAMESPACE)
        self.clients.append(Client(process, node))

    def _all_ready(self) -> bool:
        self._hear(0.1)
        return all(client.ready for client in self.clients)

    # -- a step of it

    def _step(self) -> None:
        now = time.monotonic()
        due = [one for one in self._due if one[0] <= now]
        self._due = [one for one in self._due if one[0] > now]
        for _, undo in due:
            undo()
        for node in self.nodes:
            if node not in self._down and not node.alive():
                self._ended(node)
        for client in self.clients:
            if client.order is None and client.ready and not client.frozen and client.rests < now:
                self._give(client)
        self._hear(0.02)

    def _strike(self, name: str, fault: Fault) -> None:
        undoing = fault(self)
        self.totals.count(f"fault: {name}")
        if undoing is not None:
            self.later(*undoing)

    def _ended(self, node: NodeProcess) -> None:
        self._down.add(node)
        self._deaths[node].append(time.monotonic())
        if node in self.limited:
            self.totals.count("ended at the limit of its memory: node")
        else:
            self.found("ended", f"{node.node_id} ended by itself: {node.log_text()[-500:]}")
        self.later(0.2, lambda: self._restart(node))

    def _give(self, client: Client) -> None:
        kind = self.chance.choices(
            ("insert", "read", "hand", "take", "claim", "fill"),
            (4, 6, 2, 2, 1, 3 if self._fills else 0),
        )[0]
        if kind in ("insert", "hand", "fill"):
            number = next(self._numbers)
            if kind != "fill":
                if self._inserted_bytes > BUDGET_BYTES:
                    return
                self._inserted_bytes += nbytes_of(kind, number)
        elif kind == "claim":
            number = self.chance.randrange(20)
        else:
            number = self._some("insert" if kind == "read" else "hand")
            if not number:
                return
        client.order, client.since = (kind, number), time.monotonic()
        with suppress(BrokenPipeError):  # it has ended, and is heard of in a moment
            client.process.send(client.order)

    def _some(self, kind: str) -> int:
        """A number that was published, and of hand-offs one that nobody has tried to take."""
        busy = {client.order for client in self.clients}
        open_ones = [
            item.number
            for item in self._published.values()
            if item.kind == kind
            and (kind != "hand" or not (item.won or item.uncertain))
            and ("take", item.number) not in busy
        ]
        return self.chance.choice(open_ones) if open_ones else 0

    def _hear(self, seconds: float) -> None:
        pipes = {client.process.pipe: client for client in self.clients}
        for pipe in wait(list(pipes), timeout=seconds):
            client = pipes[pipe]  # type: ignore[index]
            try:
                said = client.process.pipe.recv()
            except (EOFError, ConnectionError):
                self._client_ended(client)
                continue
            if said == READY:
                client.ready = True
            elif client.order is not None:
                (kind, number), client.order = client.order, None
                self._outcome(client, kind, number, *said)
        now = time.monotonic()
        for client in list(self.clients):
            busy = client.order is not None or not client.ready
            if busy and not client.frozen and now - client.since > scaled(HANG_SECONDS):
                self.found("hang", f"{client.order or 'the start'} of a client of "
                           f"{client.node.node_id}")  # fmt: skip
                self.kill_client(client)

    def _client_ended(self, client: Client) -> None:
        if client.ready:
            self.found("ended", f"a client ended by itself: exit {client.process.wait()}")
        else:
            self.totals.count("clients that found no node")  # it was struck while they attached
        self._lost_client(client)
        client.process.__exit__()

    def _outcome(self, client: Client, kind: str, number: int, began: float, outcome: str) -> None:
        self.totals.count(f"{kind}: {outcome.partition(' ')[0]}")
        if outcome == "NodeUnavailable":
            client.rests = time.monotonic() + REST_SECONDS
        if outcome.startswith("raised"):
            self.found("other", f"{kind} {number} {outcome}")
        if outcome == "wrong bytes":
            self.found("wrong bytes", f"{kind} {number} on {client.node.node_id}")
        if outcome == "equal":
            self.totals.count("verified")
        if outcome == "stored" and kind != "fill":
            self.totals.count("acknowledged")
            self._published[kind, number] = Publication(kind, number, client.node, began)
        if kind == "take" and (item := self._taken_by((kind, number))):
            if outcome == "equal":
                item.won += 1
                if item.won > 1:
                    self.found("other", f"hand-off {number} was taken twice")
            else:
                item.uncertain = True

    def _taken_by(self, order: tuple[str, int]) -> Publication | None:
        return self._published.get(("hand", order[1])) if order[0] == "take" else None

    # -- the end of it

    def _mend(self) -> None:
        while self._due:
            _, undo = self._due.pop(0)
            undo()
            for node in self.nodes:
                if node not in self._down and not node.alive():
                    self._ended(node)
        for node in list(self.starved):
            self._revive(node)
        for node in self.nodes:
            wait_until(lambda: _has_store(node), VISIBLE_SECONDS, "the store is up")  # noqa: B023

    def _revive(self, node: NodeProcess) -> None:
        """Kill a node that hangs since a thread of it got no memory."""
        try:
            node.stats()
        except NodeUnavailable:
            self.totals.count("hung since the limit of its memory: node")
            self.kill_node(node)()

    def _drain(self) -> None:
        until = time.monotonic() + scaled(HANG_SECONDS)
        while any(client.order for client in self.clients) and time.monotonic() < until + 1.0:
            self._hear(0.1)

    def _verify(self) -> None:
        with ExitStack() as closing:
            buffers = {node: closing.enter_context(node.client(NAMESPACE)) for node in self.nodes}
            left = [item for item in self._published.values() if self._at_holder(item, buffers)]
            until = time.monotonic() + scaled(VISIBLE_SECONDS)
            while left and time.monotonic() < until:
                left = [item for item in left if not self._elsewhere(item, buffers)]
            for item in left:
                self.found("lost", f"{item.kind} {item.number} is not seen from other nodes")
            evicted = sum(buffers[node].stats().get("evicted", 0) for node in self.nodes)
            self.totals.count("evicted by nodes that lived", evicted)

    def _at_holder(self, item: Publication, buffers: Mapping[NodeProcess, LookupBuffer]) -> bool:
        """Whether it is to be found from other nodes, too."""
        if item.won or item.uncertain:
            return False
        died = any(at > item.began for at in self._deaths[item.holder])
        if item.kind == "hand" and died:
            self.totals.count("lost with its holder")
            return False  # and nobody waits for it
        kind = "take" if item.kind == "hand" else "read"
        timeout = 0.0 if kind == "read" and self._fills else HAND_SECONDS
        found = self._read(buffers[item.holder], kind, item.number, timeout)
        if not found and died:
            self.totals.count("lost with its holder")
        elif not found and self._fills and kind == "read":
            self.totals.count("evicted")
        elif not found:
            self.found("lost", f"{item.kind} {item.number} on {item.holder.node_id}")
        return found and kind == "read" and len(self.nodes) > 1

    def _elsewhere(self, item: Publication, buffers: Mapping[NodeProcess, LookupBuffer]) -> bool:
        other = self.chance.choice([node for node in self.nodes if node is not item.holder])
        found = self._read(buffers[other], "read", item.number, 0.5)
        if not found and self._fills:  # evicted by the copies that these reads make
            return not self._read(buffers[item.holder], "read", item.number, 0.0)
        return found

    def _read(self, buffer: LookupBuffer, kind: str, number: int, timeout: float) -> bool:
        try:
            if kind == "take":
                tensor = buffer.drop_select(key_of(kind, number), timeout=timeout)
            else:
                tensor = buffer.select(key_of(kind, number), timeout=timeout)
        except (MissingTensor, TimeoutError, NodeUnavailable):
            return False
        if not is_value(kind, number, tensor):
            self.found("wrong bytes", f"{kind} {number} at the end")
        self.totals.count("verified")
        return True

    def _rest(self) -> None:
        """Gauges and open files are back, and the dashboards answer."""
        for client in self.clients:
            client.process.__exit__()
        self.clients = []
        for node in self.nodes:
            try:
                links = self._links(node)
                at_rest(node, open_files=self._files[node] + links, seconds=10.0)
                assert links <= LINKS_MAX * (len(self.nodes) - 1), f"{links} files of links"
                if node.settings.http_listen:
                    wait_until(lambda: get(node, "/healthz")[0] == 200, 15.0, "healthy")  # noqa: B023
            except (OSError, LookupBufferError, AssertionError, pytest.fail.Exception) as error:
                self.found("gauge", str(error))
            if node in self.was_starved:
                self._forgive(node)
            self.totals.count("nodes found at rest")

    def _links(self, node: NodeProcess) -> int:
        """Open files that are connections to other nodes, which are kept for a minute."""
        ports = {
            here for one in self.nodes for here, _, state, _ in _sockets(one) if state == LISTEN
        }
        links = {file for here, there, _, file in _sockets(node) if ports & {here, there}}
        return sum(file in links for file in _files(node))

    def _forgive(self, node: NodeProcess) -> None:
        """Tracebacks of what found no memory are counted, and no finding."""
        text = node.log_text()
        tracebacks = text.count("Traceback")
        if 0 < tracebacks <= sum(text.count(said) for said in WITHOUT_MEMORY):
            self.totals.count("tracebacks at the limit of memory", tracebacks)
            os.truncate(node.log, 0)


def _files(node: NodeProcess) -> list[str]:
    found = []
    for one in Path(f"/proc/{node.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(one))
    return found


def _sockets(node: NodeProcess) -> Iterator[tuple[int, int, str, str]]:
    """Its TCP sockets: own port, other port, state, file."""
    files = set(_files(node))
    for line in Path(f"/proc/{node.pid}/net/tcp").read_text("ascii").splitlines()[1:]:
        _, here, there, state, *rest = line.split()
        if (file := f"socket:[{rest[5]}]") in files:
            yield _port(here), _port(there), state, file


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


def _has_store(node: NodeProcess) -> bool:
    try:
        return bool(node.stats()["store_up"])
    except NodeUnavailable:
        return False


class _Memory:
    """The private memory of nodes, from a moment on which is past the start."""

    def __init__(self, nodes: Sequence[NodeProcess], begin: float) -> None:
        self._nodes, self._begin = nodes, begin
        self._first: dict[NodeProcess, tuple[int, int]] = {}

    def look(self, now: float, deaths: Mapping[NodeProcess, list[float]]) -> None:
        if now >= self._begin and not self._first:
            living = [node for node in self._nodes if not deaths.get(node) and node.alive()]
            self._first = {node: (node.pid, private_bytes(node.pid)) for node in living}

    def growths(self, deaths: Mapping[NodeProcess, list[float]]) -> Iterator[int]:
        for node, (pid, first) in self._first.items():
            if not deaths.get(node) and node.alive() and node.pid == pid:
                yield private_bytes(pid) - first


def private_bytes(pid: int) -> int:
    """Resident memory without what is shared, as the arena is."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
