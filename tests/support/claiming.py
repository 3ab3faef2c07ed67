"""Sets of claims for tests, and what the server has of them."""

from collections.abc import Sequence

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import ClaimHandle
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import key, wait_until
from patience import scaled
from servers import command
from store import EmbeddedServer

NAMESPACE = Namespace.named("tests").fingerprint
WAIT_SECONDS = 120.0
SOON_SECONDS = 1.0
"""In truth some milliseconds."""


def claim_in(server: EmbeddedServer, name: TensorKey) -> bytes:
    """What the server has of the claim; b"$-1" where there is none."""
    return command(server.url, "GET", f"lb:claim:{NAMESPACE}:{{{name.text}}}")


def keys(count: int) -> list[TensorKey]:
    return sorted((key() for _ in range(count)), key=lambda one: one.text)


def ask(
    buffer: LookupBuffer, names: Sequence[TensorKey], wait_seconds: float = WAIT_SECONDS
) -> ClaimHandle:
    """A set that is settled, or known to wait for another."""
    one = buffer.claim_all(names, wait_seconds=wait_seconds, timeout=scaled(5.0))
    assert one.holder or one.state is not ClaimOutcome.PENDING, "the node did not answer"
    return one


def settled(one: ClaimHandle, seconds: float = SOON_SECONDS) -> ClaimOutcome:
    wait_until(lambda: one.state is not ClaimOutcome.PENDING, seconds)
    return one.state
