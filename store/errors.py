"""What a store can fail with. A miss is not an error: it is `None`, `False` or an empty answer."""

from store.answers import Beat


class StoreError(Exception):
    """Base of all errors of this package."""


class StoreUnavailable(StoreError):
    """The server was not reached, did not answer in time, is loading, or refuses to serve us.

    It does not say whether a write took effect: the request may have been carried out and only
    its answer lost. Every operation but the adding of counters may therefore simply be repeated.
    `forbidden` tells that the server's ACL does not allow it.
    """

    forbidden = False


class StoreRefused(StoreUnavailable):
    """The server answered that it does not serve this, or not now: another one may have to."""


class StoreFull(StoreError):
    """The server is out of memory and may evict nothing: this write was not done.

    Reads, beats, withdrawals and the release of claims still work then.
    """


class StoreCorrupt(StoreError):
    """A key of ours holds something that is not ours, or the server cannot run our scripts.

    `wrong_type` tells the first.
    """

    wrong_type = False


class NodeTaken(StoreError):
    """Another boot stands under this node's id; `beat` is its last one."""

    def __init__(self, node: str, beat: Beat) -> None:
        super().__init__(f"node id {node!r} belongs to boot {beat.boot}")
        self.node = node
        self.beat = beat


class StoreUrlError(StoreError, ValueError):
    """A store URL that we cannot use. The message names what is allowed, never a password."""


class EmbeddedServerError(StoreError):
    """The embedded server could not be found or started. The message says what to do."""
