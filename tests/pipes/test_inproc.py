"""`inproc` pipes: the contract."""

from contextlib import ExitStack
from itertools import count

import pytest

from contract_pipe import Ends, MakeEnds, PipeContract, closing, threads
from contract_pipe_limits import PipeLimitsContract
from lookup_buffer.errors import ConfigError, PipeTimeout
from lookup_buffer.pipes import PipeLimits, open_pipe

__all__ = ["closing", "threads"]
_names = count()


@pytest.fixture
def make_ends(closing: ExitStack) -> MakeEnds:
    def make(limits: PipeLimits | None = None) -> Ends:
        uri = f"inproc://{next(_names)}"
        a = open_pipe(uri, listen=True, limits=limits)
        b = open_pipe(uri, limits=limits)
        closing.callback(a.abort)
        closing.callback(b.abort)
        return a, b

    return make


class TestInprocPipe(PipeContract, PipeLimitsContract):
    pass


def test_a_name_is_taken_while_somebody_listens() -> None:
    with open_pipe("inproc://taken", listen=True), pytest.raises(ConfigError, match="listens"):
        open_pipe("inproc://taken", listen=True)
    with pytest.raises(PipeTimeout):
        open_pipe("inproc://taken", timeout=0.05)
    open_pipe("inproc://taken", listen=True).close()
