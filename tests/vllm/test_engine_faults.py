"""Two real vLLM engines while Redis, nodes, clients and engines fail: the answers stay right.

Every test starts Redis and both nodes anew, at the same places; the engines live through all of it
and attach again. Here engine a has scheduler and worker in one process, and engine b in two. The
last test kills engine b.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engines import FETCH_WAIT_SECONDS, NONE_KNOWN, SIZE, Album, Engine, EnginePair, TwoHosts
from examples.demo.engine import Question
from examples.demo.engine_settings import Placement
from nodes import ROOT, NodeProcess, at_rest, wait_until
from patience import scaled
from raw_ends import hostile
from servers import frozen
from store.tracking import PAUSE_SECONDS_MAX

pytestmark = pytest.mark.vllm
PLACEMENTS = (Placement.ONE_PROCESS, Placement.TWO_PROCESSES)

# The bounds. Alone, an answer of these engines takes a tenth of a second; the rest of AT_ONCE is
# for a machine that is busy.
AT_ONCE_SECONDS = 2.0
"""Nothing is waited for: the fault is known, or does not concern the request."""
STORE_PAUSE_SECONDS = PAUSE_SECONDS_MAX + 0.5
"""A node that found the store silent asks it again after a pause, of a second at most."""
AFTER_WAIT_SECONDS = AT_ONCE_SECONDS + FETCH_WAIT_SECONDS
"""The request waits as long as it may for bytes on their way (`fetch_wait_seconds`)."""
RECOVERY_SECONDS = 8.0
"""Until a new Redis knows again what the nodes hold."""
PINS_SECONDS = 2.0
"""Until the pins of an engine that was killed are given back."""
HALF_BYTES = SIZE.nbytes_per_image // 2
STORE_SECONDS = 1.0


@pytest.fixture
def hosts(places: TwoHosts, engine_pair: EnginePair) -> Iterator[TwoHosts]:
    places.start()
    places.wait_until_attached()
    try:
        yield places
        for node in places.nodes:
            at_rest(node)
    finally:
        places.stop()


def encoded(engine: Engine, pair: EnginePair, question: Question, seconds: float) -> None:
    assert pair.ask(engine, question, within_seconds=seconds).origins == ("encoded",)


def loaded(engine: Engine, pair: EnginePair, question: Question, seconds: float) -> None:
    assert pair.ask(engine, question, within_seconds=seconds).origins == ("loaded",)


def known_to_a(hosts: TwoHosts, pair: EnginePair, count: int) -> list[Question]:
    """Pictures that engine a encoded and node a holds; engine a itself holds only the last."""
    questions = [pair.fresh() for _ in range(count)]
    for question in questions:
        encoded(pair.a, pair, question, AT_ONCE_SECONDS)
    for question in questions:
        hosts.wait_for_holder(pair.identifier(question), hosts.a)
    return questions


def begin_transfer(hosts: TwoHosts, pair: EnginePair, question: Question) -> None:
    """Ask engine b; when this returns, node b has half of the image from node a."""
    hosts.relay.hold_after(HALF_BYTES)
    pair.b.submit([question])
    wait_until(lambda: hosts.b.stats()["reserved_bytes"], AT_ONCE_SECONDS, "a transfer begins")


def end_without_it(pair: EnginePair, question: Question, within_seconds: float) -> None:
    """The answer to `begin_transfer`, which did without the transfer, from now on in time."""
    within_seconds = scaled(within_seconds)
    started = time.monotonic()
    (answer,) = pair.b.collect(timeout_seconds=2 * within_seconds)
    seconds = time.monotonic() - started
    assert answer.origins == ("encoded",)
    assert answer.tokens == pair.tokens(question)
    assert seconds < within_seconds


def shares_again(hosts: TwoHosts, pair: EnginePair) -> None:
    (question,) = known_to_a(hosts, pair, 1)
    loaded(pair.b, pair, question, AT_ONCE_SECONDS)


def test_redis_killed_and_back(hosts: TwoHosts, engine_pair: EnginePair) -> None:
    pair = engine_pair
    first, second, _ = known_to_a(hosts, pair, 3)
    os.kill(hosts.server.pid, signal.SIGKILL)
    encoded(pair.b, pair, first, AT_ONCE_SECONDS)  # nobody can say that node a has it
    loaded(pair.a, pair, first, AT_ONCE_SECONDS)  # node a itself needs no Redis
    encoded(pair.a, pair, pair.fresh(), AT_ONCE_SECONDS)
    hosts.restart_server()
    wait_until(
        lambda: hosts.a.node_id in hosts.holders(pair.identifier(second)),
        RECOVERY_SECONDS,
        "node a publishes again what it holds",
    )
    wait_until(  # node b found the store gone, and asks it again after a pause
        lambda: hosts.sees(hosts.b, pair.identifier(second)), RECOVERY_SECONDS, "node b knows"
    )
    loaded(pair.b, pair, second, AT_ONCE_SECONDS)
    shares_again(hosts, pair)


def test_redis_stopped(hosts: TwoHosts, engine_pair: EnginePair) -> None:
    pair = engine_pair
    *under_way, first, second, _ = known_to_a(hosts, pair, 6)
    pair.b.submit(under_way)  # of these, some are asked for before and some after
    with frozen(hosts.server):
        for question, answer in zip(
            under_way, pair.b.collect(timeout_seconds=scaled(AFTER_WAIT_SECONDS)), strict=True
        ):
            assert answer.tokens == pair.tokens(question)
        encoded(pair.b, pair, first, AT_ONCE_SECONDS)
        loaded(pair.a, pair, first, AT_ONCE_SECONDS)
        encoded(pair.a, pair, pair.fresh(), AT_ONCE_SECONDS)
    time.sleep(STORE_PAUSE_SECONDS)
    loaded(pair.b, pair, second, AT_ONCE_SECONDS)
    shares_again(hosts, pair)


def test_the_readers_node_killed_in_the_middle_of_a_transfer(
    hosts: TwoHosts, engine_pair: EnginePair
) -> None:
    pair = engine_pair
    first, second = known_to_a(hosts, pair, 2)
    begin_transfer(hosts, pair, first)
    hosts.b.kill()
    end_without_it(pair, first, AT_ONCE_SECONDS)
    encoded(pair.b, pair, pair.fresh(), AT_ONCE_SECONDS)
    loaded(pair.a, pair, first, AT_ONCE_SECONDS)
    hosts.relay.let_go()
    hosts.b.start()
    hosts.wait_until_attached()
    loaded(pair.b, pair, second, AT_ONCE_SECONDS)


def test_the_holders_node_killed_in_the_middle_of_a_transfer(
    hosts: TwoHosts, engine_pair: EnginePair
) -> None:
    pair = engine_pair
    first, second, _ = known_to_a(hosts, pair, 3)
    begin_transfer(hosts, pair, first)
    hosts.a.kill()
    hosts.relay.cut()
    end_without_it(pair, first, AT_ONCE_SECONDS)
    encoded(pair.b, pair, second, AT_ONCE_SECONDS)  # Redis still names node a
    encoded(pair.a, pair, first, AT_ONCE_SECONDS)
    hosts.relay.let_go()
    hosts.a.start()
    hosts.wait_until_attached()
    shares_again(hosts, pair)


def test_a_transfer_that_stands_still(hosts: TwoHosts, engine_pair: EnginePair) -> None:
    pair = engine_pair
    first, second = known_to_a(hosts, pair, 2)
    begin_transfer(hosts, pair, first)
    end_without_it(pair, first, AFTER_WAIT_SECONDS)
    hosts.relay.let_go()
    loaded(pair.b, pair, second, AFTER_WAIT_SECONDS)


@pytest.mark.parametrize("which", ["reader", "holder"])
def test_a_node_stopped(hosts: TwoHosts, engine_pair: EnginePair, which: str) -> None:
    pair = engine_pair
    first, second = known_to_a(hosts, pair, 2)
    node, others = (hosts.b, pair.a) if which == "reader" else (hosts.a, pair.b)
    with node.frozen():
        encoded(pair.b, pair, first, AFTER_WAIT_SECONDS)
        encoded(others, pair, pair.fresh(), AT_ONCE_SECONDS)
        encoded(pair.a, pair, pair.fresh(), AFTER_WAIT_SECONDS)
    hosts.wait_until_attached()
    wait_until(lambda: not hosts.a.stats()["unpublished"], RECOVERY_SECONDS)
    # It may have been silent for so long that the other one takes it for dead, even now: beats are
    # read once a second, so the first after the pause was surely read when the third has come.
    hosts.wait_for_beats(node, 3)
    wait_until(lambda: hosts.sees(hosts.b, pair.identifier(second)), RECOVERY_SECONDS)
    loaded(pair.b, pair, second, AFTER_WAIT_SECONDS)
    shares_again(hosts, pair)


ATTACK = """
import ctypes, json, mmap, os, sys
from pathlib import Path
from lookup_buffer.client.session import NodeConnection, next_request_id
from lookup_buffer.protocol.messages import VERSION, Hello
import time
connection = NodeConnection(Path(sys.argv[1]), timeout=5.0)
deadline = time.monotonic() + 5.0
connection.send(Hello(next_request_id(), VERSION, None, {}), deadline=deadline)
welcome, (arena, *_) = connection.receive_with_descriptors(deadline)
nbytes = welcome["arena_bytes"]
writable = mmap.PROT_READ | mmap.PROT_WRITE
libc = ctypes.CDLL(None)
def punch_hole():
    if libc.fallocate(arena, 3, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
        raise PermissionError
def write_anew():
    again = os.open(f"/proc/self/fd/{arena}", os.O_RDWR)
    try:
        os.pwrite(again, bytes(nbytes), 0)
    finally:
        os.close(again)
attacks = [
    lambda: os.ftruncate(arena, 0),
    lambda: os.ftruncate(arena, 2 * nbytes),
    lambda: os.pwrite(arena, bytes(nbytes), 0),
    lambda: mmap.mmap(arena, nbytes, mmap.MAP_SHARED, writable),
    write_anew,
    punch_hole,
]
refused, done = [0] * len(attacks), [0] * len(attacks)
print("ready", flush=True)
os.set_blocking(0, False)
while sys.stdin.buffer.raw.read(1) is None:
    for number, attack in enumerate(attacks):
        try:
            attack()
            done[number] += 1
        except PermissionError:
            refused[number] += 1
print(json.dumps([refused, done]), flush=True)
"""


def attack(node: NodeProcess) -> "subprocess.Popen[str]":
    """A client of `node` that does to the arena's descriptor all that it can, until told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACK, str(node.socket_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_client_that_truncates_and_writes_the_arena(
    hosts: TwoHosts, engine_pair: EnginePair
) -> None:
    pair = engine_pair
    questions = known_to_a(hosts, pair, 3)
    with attack(hosts.b) as attacker:
        try:
            for question in [*questions, *questions]:  # from node a, then from node b's arena
                loaded(pair.b, pair, question, AT_ONCE_SECONDS)
            refused, done = json.loads(attacker.communicate("end", timeout=scaled(10.0))[0])
        finally:
            attacker.kill()
    assert done == [0] * len(done)
    assert min(refused) > 0
    assert hosts.b.alive()


def test_garbled_frames_disturb_no_engine(hosts: TwoHosts, engine_pair: EnginePair) -> None:
    """Sent to the engine's node, each on a connection of its own, which the node ends."""
    pair = engine_pair
    questions = itertools.cycle(known_to_a(hosts, pair, 3))
    for garbage in hostile("frames", "node").values():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(scaled(5.0))
            stranger.connect(str(hosts.b.socket_path))
            stranger.sendall(garbage)
            loaded(pair.b, pair, next(questions), AT_ONCE_SECONDS)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):  # a refusal may come before the end
                    pass
    encoded(pair.b, pair, pair.fresh(), AT_ONCE_SECONDS)
    assert hosts.b.alive()


def test_an_engine_killed_while_it_holds_pins(
    hosts: TwoHosts, engine_pair: EnginePair, album: Album
) -> None:
    """Engine b, which ends here, waits for one image while another one is pinned."""
    pair = engine_pair
    here, there = album.about(NONE_KNOWN[0]), album.about(NONE_KNOWN[1])
    encoded(pair.b, pair, here, AT_ONCE_SECONDS)
    encoded(pair.b, pair, pair.fresh(), AT_ONCE_SECONDS)
    encoded(pair.a, pair, there, AT_ONCE_SECONDS)
    hosts.wait_for_holder(pair.identifier(here), hosts.b)
    hosts.wait_for_holder(pair.identifier(there), hosts.a)
    begin_transfer(hosts, pair, album.about(*NONE_KNOWN[:2]))
    wait_until(lambda: hosts.b.stats()["pins"], AT_ONCE_SECONDS, "engine b holds a pin")
    pair.b.kill()
    wait_until(lambda: not hosts.b.stats()["pins"], PINS_SECONDS, "its pins are given back")
    hosts.relay.let_go()
    loaded(pair.a, pair, here, AT_ONCE_SECONDS)  # node b serves what the engine left there
    encoded(pair.a, pair, pair.fresh(), AT_ONCE_SECONDS)
