"""Two connected ends of a pipe, and the contract of its token, for the tests of each scheme."""

from contextlib import ExitStack

import pytest

from contract_pipe import LARGE, SOON_SECONDS, TOKEN, Ends, same
from lookup_buffer.errors import NodeRefused
from lookup_buffer.pipes import PipeLimits, open_pipe
from payloads import block


def connected_ends(closing: ExitStack, uri: str, limits: PipeLimits | None = None) -> Ends:
    """The end that listens at `uri` and the one that connects; `closing` aborts both."""
    a = open_pipe(uri, listen=True, limits=limits)
    closing.callback(a.abort)
    b = open_pipe(a.uri, limits=limits)
    closing.callback(b.abort)
    return a, b


class TokenContract:
    """Inherit it in a class `Test…` of a module with the fixture `uri`, an address to listen at."""

    def test_an_end_with_another_token_is_refused(self, closing: ExitStack, uri: str) -> None:
        a = closing.enter_context(open_pipe(uri, listen=True, token=TOKEN))
        for token in (None, TOKEN[::-1]):
            with pytest.raises(NodeRefused):
                open_pipe(a.uri, token=token)
        b = closing.enter_context(open_pipe(a.uri, token=TOKEN))
        for tensor in (None, block(LARGE)):
            b.send_tensor(tensor)
            assert same(a.recv_tensor(timeout=SOON_SECONDS), tensor)
