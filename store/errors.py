"""The errors of a store. A miss is no error: it is `None`, `False` or an empty result."""

from store.answers import Beat


class StoreError(Exception):
    """Base of all errors of this package."""


class StoreUnavailable(StoreError):
    """The server was not reached, did not answer in time, is loading, or refuses to serve us.

    A write may still have taken effect, if only its reply was lost. Every operation may be
    repeated, except that counters may then count twice.
    """


class StoreRefused(StoreUnavailable):
    """The server replied that it does not serve this command, or not now.

    `forbidden` is True if its ACL denies the command.
    """

    forbidden = False


class StoreFull(StoreError):
    """The server is out of memory and may evict nothing: this write was not done.

    Reads, beats, withdrawals and releases of claims still work.
    """


class StoreCorrupt(StoreError):
    """A key of ours holds a foreign value, or the server cannot run our scripts.

    `wrong_type` is True in the first case.
    """

    wrong_type = False


class NodeTaken(StoreError):
    """Another boot is registered under this node's id; `beat` is its last one."""

    def __init__(self, node: str, beat: Beat) -> None:
        super().__init__(
            f"node id {node!r} is registered by another process, boot {beat.boot}; "
            "give each node an id of its own"
        )
        self.node = node
        self.beat = beat


class StoreNotBrowsable(StoreError):
    """The store keeps what nodes need, and not what this command or page shows."""

    def __init__(self, store: object, why: str = "it has only what nodes need") -> None:
        super().__init__(f"the store {type(store).__name__} cannot be browsed: {why}")


class StoreUrlError(StoreError, ValueError):
    """A store URL that cannot be used. The message says what is allowed, and never shows a
    password.
    """


class EmbeddedServerError(StoreError):
    """The embedded server could not be found or started. The message says what to do."""
