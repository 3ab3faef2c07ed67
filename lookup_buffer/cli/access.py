"""The way to the store that commands inspect. No node is needed for it, and none is started."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from lookup_buffer.access import EMBEDDED, StoreAccess
from lookup_buffer.cli.exits import CommandError, ExitCode
from lookup_buffer.runtime_directory import runtime_directory
from store import MetadataStore, redact

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
