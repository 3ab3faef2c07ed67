"""Records as commands show them, liveness of nodes by their beats, and access to the store.

Liveness within one command: a node beats once a second, and `HeartbeatMonitor` reads the beats
until they have changed. No clock of another machine takes part. Only a change of the beat tells a
node that is alive from one that was killed a moment ago.

`opened_store` opens the store that a command inspects. It needs no node and starts none.
Everything runs on the caller's thread and may block on the store. It must not know the single
commands.
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
    """Something wrong was found, or the key is absent."""
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130
    """Ended by Ctrl-C: 128 + SIGINT, as a shell reports a process that the signal killed."""
    NOBODY_READS = 141
    """The reader of the output closed it, as `head` does: 128 + SIGPIPE, likewise."""


class CommandError(Exception):
    """A command cannot continue. The text is one line that says what to do."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


def size_text(nbytes: float) -> str:
    """A size as text: `1.6 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1023.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def age_text(seconds: float) -> str:
    """An age as text: `5 min`. The largest unit of which there is at least one, rounded down."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return "0 s"


def age_since(created: float) -> float:
    """Seconds since `created`, the wall clock of the first publisher; never negative."""
    return max(0.0, time.time() - created)


POLL_SECONDS = 0.1


class HeartbeatMonitor:
    """Which nodes are alive. Reads all beats when it is made and again in `settle`.

    Other work may be done between the two. Not thread-safe.
    """

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
        """Boot by node, for nodes whose description was younger than SILENT_SECONDS in `glance`."""

    def settle(self, nodes: Iterable[str] | None = None) -> None:
        """Read beats until the beat of each of `nodes` has changed, or the time is up.

        None means all nodes with a beat. The time ends SILENT_SECONDS after this object was made.
        """
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
        """Count nodes as alive that described themselves within SILENT_SECONDS; wait for no beat.

        If no node did so far, descriptions may have been refused: a full server keeps beats only.
        Then this waits for `nodes` as `settle` does.
        """
        nodes = [node for node in nodes if node in self._first and node not in self._fresh]
        ages = self._store.node_ages(nodes)
        fresh = [node for node, seconds in ages.items() if seconds < SILENT_SECONDS]
        for node, info in self._store.node_infos(fresh).items():
            self._fresh[node] = info.boot
        if nodes and not self._fresh:
            self.settle(nodes)

    def alive(self, node: str, boot: str | None = None) -> bool:
        """Whether the beat of `node` changed, or `glance` found its description fresh.

        With `boot`: and the node still runs as that boot.
        """
        beat = self.last.get(node)
        if beat is None or not (self._moved(node) or self._fresh.get(node) == beat.boot):
            return False
        return boot is None or beat.boot == boot

    def _moved(self, node: str) -> bool:
        return node in self.last and self.last[node] != self._first.get(node)


def _note(text: str) -> AbstractContextManager[object]:
    """Show `text` while the block runs and remove it afterwards; only if stderr is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def hits_of(store: MetadataStore, records: Sequence[Record]) -> dict[tuple[str, str], int]:
    """Hits by (namespace, key), read in requests of at most 1,000 keys."""
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


def to_json(record: Record, hits: int, watch: HeartbeatMonitor) -> dict[str, Any]:
    """The stable JSON form of a record.

    A location that is only offered (a hand-off that waits for room at that node) has no checksum
    yet. `lane` is the kind of transfer by which a device of that node gives the tensor, or None.
    """
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
    """Dtype and shape as text: `bfloat16 729x1152`; `none` for a stored None."""
    if record.kind == "none":
        return "none"
    return f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def nodes_text(record: Record, watch: HeartbeatMonitor) -> str:
    """`+host-a -host-b ~host-c`: alive; not alive; alive, but only offering the item."""
    return " ".join(_mark(location, watch) + location.node for location in record.locations)


def _mark(location: Location, watch: HeartbeatMonitor) -> str:
    if not watch.alive(location.node, location.boot):
        return "-"
    return "~" if location.is_offer else "+"


def traces_of(store: MetadataStore) -> "Traces":
    """The reader of traces of single keys, which only a store on a server offers."""
    from store.redis_store import RedisStore  # slow to import; imported by now

    assert isinstance(store, RedisStore)  # a node can be configured with no other
    return store.traces()


PATIENCE_SECONDS = 3.0
"""Least timeout of the store for commands: a person waits longer than an engine, and pages of a
scan are large."""


@contextmanager
def opened_store(access: StoreAccess) -> Iterator[MetadataStore]:
    """The store as a context; it is closed at the end.

    Raises:
        ConfigError: a TLS file that the URL names cannot be used.
        CommandError: the store is the embedded server, and it does not run or its directory
            cannot be used.
    """
    access.check_files()
    try:
        url = access.actual_url()
    except OSError as error:  # the runtime directory cannot be created
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
    """The store's URL without credentials, in the form that other commands accept."""
    return redact(access.actual_url())


def socket_of(url: str) -> Path:
    """The path in a unix:// URL."""
    return Path(unquote(url.removeprefix("unix://").partition("?")[0]))


def answers(path: Path) -> bool:
    """Whether a process listens on the unix socket at `path`; tried for at most 1 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
