"""A user of a server whose password is changed, as docs/operations.md says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from servers import command
from store import EmbeddedServer

USER, OLD, NEW = "rotating", "old-secret", "new-secret"
RIGHTS = ("on", "~*", "&*", "+@all")


@contextmanager
def rotating_user(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """The server with the user, whose password is OLD."""
    assert command(server.url, "ACL", "SETUSER", USER, f">{OLD}", *RIGHTS) == b"+OK"
    try:
        yield server
    finally:
        command(server.url, "ACL", "DELUSER", USER)


def rotate(server: EmbeddedServer, change: Callable[[], object]) -> None:
    """The new password, `change` what clients use, then the old one; all connections are cut."""
    assert command(server.url, "ACL", "SETUSER", USER, f">{NEW}") == b"+OK"
    change()
    assert command(server.url, "ACL", "SETUSER", USER, f"<{OLD}") == b"+OK"
    assert int(command(server.url, "CLIENT", "KILL", "USER", USER).lstrip(b":")) > 0
