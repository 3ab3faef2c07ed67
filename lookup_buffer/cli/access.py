"""The way to the store that commands inspect. No node is needed for it, and none is started."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from lookup_buffer.cli.exits import CommandError, ExitCode
from store import MetadataStore, redact

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

PATIENCE_SECONDS = 3.0
"""A person waits longer than an engine does, and pages of a scan are large."""


@contextmanager
def opened_store(config: "BufferConfig") -> Iterator[MetadataStore]:
    """The store of `config`, closed afterwards.

    Raises:
        CommandError: the store is the embedded server, and none runs or its directory is unfit.
    """
    from lookup_buffer.node.storage import open_configured, store_url

    try:
        url = store_url(config)
    except OSError as error:  # the runtime directory cannot be made
        raise CommandError(
            f"{error.filename}: {error.strerror}; choose another --directory", ExitCode.USAGE
        ) from error
    if config.store_url == "embedded" and not answers(socket_of(url)):
        raise CommandError(
            f"no embedded server runs in {config.runtime_directory()}: start a node by "
            "`lookup-buffer serve`, or name a server by --store-url or LOOKUP_BUFFER_STORE_URL",
            ExitCode.UNREACHABLE,
        )
    seconds = max(config.store_timeout_seconds, PATIENCE_SECONDS)
    with open_configured(config, url, seconds) as store:
        yield store


def shown_url(config: "BufferConfig") -> str:
    """The store's URL without credentials, as another command would have to name it."""
    from lookup_buffer.node.storage import store_url

    return redact(store_url(config))


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
