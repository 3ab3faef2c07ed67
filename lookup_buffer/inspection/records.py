"""Records as people and programs are shown them.

Which nodes live, found out within a command: their beats are read until they have moved.

A node beats once a second. No clock of another machine takes part, so nothing less than seeing a
beat change tells a node that lives from one that was killed a moment ago.

The way to the store that commands inspect. No node is needed for it, and none is started.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from lookup_buffer.access import EMBEDDED, StoreAccess, runtime_directory
from lookup_buffer.times import SILENT_SECONDS
from store import Beat, Location, MetadataStore, Record, redact

if TYPE_CHECKING:
    from store.trace import Traces

_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


class ExitCode(IntEnum):
    OK = 0
    FOUND = 1
    """Something wrong was found, or the key is not there."""
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130
    """By Ctrl-C; as a shell says it of who was killed by the signal."""
    NOBODY_READS = 141
    """Whoever read the output has left, as `head` does; likewise."""


class CommandError(Exception):
    """A command cannot go on. The text is one line that says what to do."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


def size_text(nbytes: float) -> str:
    """`1.6 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1023.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def age_text(seconds: float) -> str:
    """`5 min`: the largest unit of which there is one, rounded down."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return "0 s"


def age_since(created: float) -> float:
    """Seconds since the wall clock of the first publisher said `created`; never negative."""
    return max(0.0, time.time() - created)


POLL_SECONDS = 0.1


class BeatWatch:
    """Begins to watch when it is made; other work may be done before `settle`."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._until = clock() + SILENT_SECONDS
        self._first = store.beats()
        self.last: dict[str, Beat] = dict(self._first)
        self._fresh: dict[str, str] = {}
        """Boots that described themselves a moment before somebody glanced at them."""

    def settle(self, nodes: Iterable[str] | None = None) -> None:
        """Look until each of `nodes` (None: all that beat) has moved, or the time is up."""
        if nodes is None:
            nodes = self._first
        waited_for = [node for node in nodes if node in self._first]
        with _note("waiting for the nodes' beats …"):
            while not all(self._moved(node) for node in waited_for):
                if self._clock() >= self._until:
                    return
                self._sleep(POLL_SECONDS)
                self.last = self._store.beats()

    def glance(self, nodes: Iterable[str]) -> None:
        """Take those for alive that described themselves a moment ago, without waiting for a beat.

        Where nobody did, though nodes are listed, they may have been refused (a full server keeps
        beats only): then it is waited as `settle` does.
        """
        nodes = [node for node in nodes if node in self._first and node not in self._fresh]
        ages = self._store.node_ages(nodes)
        fresh = [node for node, seconds in ages.items() if seconds < SILENT_SECONDS]
        for node, info in self._store.node_infos(fresh).items():
            self._fresh[node] = info.boot
        if nodes and not self._fresh:
            self.settle(nodes)

    def alive(self, node: str, boot: str | None = None) -> bool:
        """Whether `node` moved, and is still the start of it that `boot` names."""
        beat = self.last.get(node)
        if beat is None or not (self._moved(node) or self._fresh.get(node) == beat.boot):
            return False
        return boot is None or beat.boot == boot

    def _moved(self, node: str) -> bool:
        return node in self.last and self.last[node] != self._first.get(node)


def _note(text: str) -> AbstractContextManager[object]:
    """A note of what takes so long, gone afterwards; only for a person at a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def hits_of(store: MetadataStore, records: Sequence[Record]) -> dict[tuple[str, str], int]:
    """Hits by (namespace, key), in bounded requests."""
    by_namespace: dict[str, list[str]] = {}
    for record in records:
        by_namespace.setdefault(record.namespace, []).append(record.key)
    hits = {}
    for namespace, keys in by_namespace.items():
        for start in range(0, len(keys), 1000):
            page = keys[start : start + 1000]
            for key, count in zip(page, store.hits(namespace, page), strict=True):
                hits[namespace, key] = count
    return hits


def nodes_of(records: Iterable[Record]) -> set[str]:
    return {location.node for record in records for location in record.locations}


def to_json(record: Record, hits: int, watch: BeatWatch) -> dict[str, Any]:
    """The stable JSON form of a record. What a node only offers, a hand-off that waits for room
    there, has no checksum as yet. `lane` is by what it can be had from a device of that node."""
    lanes = {device.node: device.kind for device in record.devices}
    return {
        "namespace": record.namespace,
        "key": record.key,
        "kind": record.kind,
        "device": record.device or None,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "nbytes": record.nbytes,
        "created": record.created,
        "age_seconds": round(age_since(record.created), 3),
        "hits": hits,
        "locations": [
            {
                **location._asdict(),
                "checksum": None if location.is_offer else f"{location.checksum:016x}",
                "offered": location.is_offer,
                "alive": watch.alive(location.node, location.boot),
                "lane": lanes.get(location.node),
            }
            for location in record.locations
        ],
    }


def tensor_text(record: Record) -> str:
    """`bfloat16 729x1152`; `none` for a stored None."""
    if record.kind == "none":
        return "none"
    return f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def nodes_text(record: Record, watch: BeatWatch) -> str:
    """`+host-a -host-b ~host-c`: alive, not alive, and alive but only offering it."""
    return " ".join(_mark(location, watch) + location.node for location in record.locations)


def _mark(location: Location, watch: BeatWatch) -> str:
    if not watch.alive(location.node, location.boot):
        return "-"
    return "~" if location.is_offer else "+"


def traces_of(store: MetadataStore) -> "Traces":
    """The closer look at single keys that only a server gives."""
    from store.redis_store import RedisStore  # slow to import, and by now it is

    assert isinstance(store, RedisStore)  # all that a node may be configured with
    return store.traces()


PATIENCE_SECONDS = 3.0
"""A person waits longer than an engine does, and pages of a scan are large."""


@contextmanager
def opened_store(access: StoreAccess) -> Iterator[MetadataStore]:
    """The store, closed afterwards.

    Raises:
        ConfigError: a TLS file that the URL names cannot be used.
        CommandError: the store is the embedded server, and none runs or its directory is unfit.
    """
    access.check_files()
    try:
        url = access.actual_url()
    except OSError as error:  # the runtime directory cannot be made
        raise CommandError(
            f"{error.filename}: {error.strerror}; choose another --directory", ExitCode.USAGE
        ) from error
    if access.url == EMBEDDED and not answers(socket_of(url)):
        raise CommandError(
            f"no embedded server runs in {runtime_directory(access.directory)}: start a node by "
            "`lookup-buffer serve`, or name a server by --store-url or LOOKUP_BUFFER_STORE_URL",
            ExitCode.UNREACHABLE,
        )
    with access.open(url, max(access.timeout_seconds, PATIENCE_SECONDS)) as store:
        yield store


def shown_url(access: StoreAccess) -> str:
    """The store's URL without credentials, as another command would have to name it."""
    return redact(access.actual_url())


def socket_of(url: str) -> Path:
    """The path in a unix:// URL."""
    return Path(unquote(url.removeprefix("unix://").partition("?")[0]))


def answers(path: Path) -> bool:
    """Whether somebody listens on the unix socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
