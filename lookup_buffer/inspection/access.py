"""Access to the store that a command inspects, and how a command fails.

`opened_store` needs no node and starts none.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from lookup_buffer.access import EMBEDDED, StoreAccess, runtime_directory
from store import BlockingStore, BrowsableStore, StoreNotBrowsable, redact

if TYPE_CHECKING:
    from store.base import Traces

CALL_SECONDS_MIN = 3.0
"""Least timeout of one store call in commands. A person waits longer than an engine, and the pages
of a scan are large."""


class ExitCode(IntEnum):
    OK = 0
    FOUND = 1
    """Something wrong was found, or the key is absent."""
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130
    """Ended by Ctrl-C: 128 + SIGINT, as a shell reports a process that the signal killed."""
    OUTPUT_CLOSED = 141
    """The reader of the output closed it, as `head` does: 128 + SIGPIPE."""


class CommandError(Exception):
    """A command cannot continue. The text is one line that says what to do."""

    def __init__(self, sentence: str, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


@contextmanager
def opened_store(
    access: StoreAccess, command: str, *, browsed: bool = True
) -> Iterator[BlockingStore]:
    """The store as a context; it is closed at the end. `command` is part of the names of its
    connections. `browsed`: as a BrowsableStore.

    Raises:
        StoreNotBrowsable: it is to be browsed, and has only what nodes need.
        ConfigError: a TLS option of the URL, or the credential provider, cannot be used.
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
    if access.url == EMBEDDED and not is_listening(_socket_of(url)):
        directory = runtime_directory(access.directory, make=False)
        raise CommandError(
            f"no embedded server runs in {directory}: start a node by "
            "`lookup-buffer serve`, or name a server by --store-url or LOOKUP_BUFFER_STORE_URL",
            ExitCode.UNREACHABLE,
        )
    seconds = max(access.timeout_seconds, CALL_SECONDS_MIN)
    with access.open(url, seconds, name=command) as store:
        if browsed and not store.browsable:
            raise StoreNotBrowsable(store.store)
        yield store


def traces_of(store: BrowsableStore) -> "Traces":
    """Raises StoreNotBrowsable: it keeps no history of keys."""
    traces = store.traces()
    if traces is None:
        raise StoreNotBrowsable(store, "it keeps no history of keys")
    return traces


def shown_url(access: StoreAccess) -> str:
    """The store's URL without credentials, in the form that other commands accept."""
    return redact(access.actual_url())


def _socket_of(url: str) -> Path:
    """The path in a unix:// URL."""
    return Path(unquote(url.removeprefix("unix://").partition("?")[0]))


def is_listening(path: Path) -> bool:
    """Whether a process listens on the unix socket at `path`; tried for at most 1 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
