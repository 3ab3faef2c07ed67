"""Pipes against a plain dictionary: random messages, keys, full budgets, ends and deaths.

One thread drives both ends, so the model has the exact content and budget at each moment.
"""

import contextlib
import threading
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from contract_pipe import same
from hypothesis_profiles import examples
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    LookupTimeout,
    PipeBroken,
    PipeClosed,
    TensorTooLarge,
)
from lookup_buffer.pipes import ANY_KEY, PipeLimits, open_pipe
from patience import scaled
from payloads import block
from store import EmbeddedServer

BUDGET = 300_000
SIZES = (None, 0, 1, 5000, 65_536, 65_537, 150_000, BUDGET)
KEYS = (None, "a", "b")
SOON_SECONDS = scaled(10.0)
_names = count()


class Traffic(RuleBasedStateMachine):
    """Messages in one direction; the other direction only carries ends."""

    scheme = "inproc"
    directory: Path
    server: EmbeddedServer

    @initialize()
    def open(self) -> None:
        addresses = {
            "inproc": f"inproc://model-{next(_names)}",
            "shm": f"shm://{self.directory}/model",
            "tcp": "tcp://127.0.0.1:0",
            "redis": f"{self.server.url}?pipe=model-{next(_names)}",
            "gloo": "gloo://127.0.0.1:0",
        }
        uri = addresses[self.scheme]
        limits = PipeLimits(buffer_bytes=BUDGET)
        self.a = open_pipe(uri, listen=True, limits=limits)
        self.b = open_pipe(self.a.uri, limits=limits)
        self.limits = limits
        self.messages: dict[str | None, deque[tuple[int, torch.Tensor | None]]] = {
            key: deque() for key in KEYS
        }
        self.seeds = count()

    def cost(self, tensor: torch.Tensor | None) -> int:
        return self.limits.cost(0 if tensor is None else tensor.nbytes)

    @property
    def used(self) -> int:
        return sum(self.cost(tensor) for queue in self.messages.values() for _, tensor in queue)

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from(SIZES))
    def send(self, key: str | None, size: int | None) -> None:
        seed = next(self.seeds)
        tensor = None if size is None else block(size, seed)
        if self.used + self.cost(tensor) > BUDGET:
            with pytest.raises(BufferFull):
                self.a.send_tensor(tensor, key, timeout=0.0)
        else:
            self.a.send_tensor(tensor, key, timeout=SOON_SECONDS)
            self.messages[key].append((seed, tensor))

    @rule()
    def send_too_much(self) -> None:
        with pytest.raises(TensorTooLarge):
            self.a.send_tensor(block(BUDGET + 1))

    @rule(key=st.sampled_from(KEYS), into=st.booleans())
    def receive(self, key: str | None, into: bool) -> None:
        if self.messages[key]:
            _, expected = self.messages[key].popleft()
            out = None
            if into and expected is not None:
                out = torch.empty_like(expected)
                with pytest.raises(CodecError):  # the message stays in the pipe
                    self.b.recv_tensor(key, timeout=SOON_SECONDS, out=torch.empty(7))
            received = self.b.recv_tensor(key, timeout=SOON_SECONDS, out=out)
            assert same(received, expected)
            assert out is None or received is out
        else:
            with pytest.raises(LookupTimeout):
                self.b.recv_tensor(key, timeout=0.0)

    @rule()
    def receive_any(self) -> None:
        keyed = [queue for key, queue in self.messages.items() if key is not None and queue]
        if keyed:
            _, expected = min(keyed, key=lambda queue: queue[0][0]).popleft()
            assert same(self.b.recv_tensor(ANY_KEY, timeout=SOON_SECONDS), expected)
        else:
            with pytest.raises(LookupTimeout):
                self.b.recv_tensor(ANY_KEY, timeout=0.0)

    @rule()
    def close_in_order_and_open_another(self) -> None:
        closing = threading.Thread(target=self.a.close)
        closing.start()
        for key, queue in self.messages.items():
            for _, expected in queue:
                assert same(self.b.recv_tensor(key, timeout=SOON_SECONDS), expected)
        closing.join()
        self._of_no_use(self.b, PipeClosed)
        self.b.close()
        self.open()

    @rule()
    @precondition(lambda self: self.used)
    def die_and_open_another(self) -> None:
        self.a.abort()
        self._of_no_use(self.b, PipeBroken)
        self._of_no_use(self.a, PipeBroken)
        self.b.close()
        self.open()

    def _of_no_use(self, end: Any, error: type[Exception]) -> None:
        with pytest.raises(error):  # once this end has detected it
            for _ in range(1 + sum(map(len, self.messages.values()))):
                end.recv_tensor("a", timeout=SOON_SECONDS)
        with pytest.raises(error):
            end.send_tensor(None)

    @invariant()
    def the_gauge_is_right(self) -> None:
        """Of `inproc`, where a receipt counts at once."""
        if hasattr(self, "a") and self.scheme == "inproc":
            assert self.a.used_bytes == self.used

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.a.abort()
            self.b.abort()


# Schemes that take longer to open have fewer examples.
@pytest.mark.parametrize(
    ("scheme", "usual"), [("inproc", 30), ("shm", 30), ("tcp", 30), ("redis", 6), ("gloo", 15)]
)
def test_random_traffic(
    scheme: str, usual: int, tmp_path: Path, valkey_server: EmbeddedServer
) -> None:
    parts = {"scheme": scheme, "directory": tmp_path, "server": valkey_server}
    machine = type("Machine", (Traffic,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(usual),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
