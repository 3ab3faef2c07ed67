"""`inproc` pipes: the contract."""

from contextlib import ExitStack
from itertools import count

import pytest

from contract_pipe import MakeEnds, PipeContract, closing, threads
from contract_pipe_limits import PipeLimitsContract
from lookup_buffer.errors import ConfigError, PipeTimeout
from lookup_buffer.pipes import open_pipe
from pipe_ends import connected_ends

__all__ = ["closing", "threads"]
_names = count()


@pytest.fixture
def make_ends(closing: ExitStack) -> MakeEnds:
    return lambda limits=None: connected_ends(closing, f"inproc://{next(_names)}", limits)


class TestInprocPipe(PipeContract, PipeLimitsContract):
    pass


def test_a_name_has_one_listener_at_a_time() -> None:
    with open_pipe("inproc://taken", listen=True), pytest.raises(ConfigError, match="listens"):
        open_pipe("inproc://taken", listen=True)
    with pytest.raises(PipeTimeout):
        open_pipe("inproc://taken", timeout=0.05)
    open_pipe("inproc://taken", listen=True).close()
