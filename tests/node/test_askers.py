"""Requests of other nodes to the owner of hand-offs, in any order and form."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lookup_buffer.access import user_token
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import (
    LookupBufferError,
    MissingTensor,
    NodeRefused,
    PipeBroken,
    ProtocolError,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node import takes
from lookup_buffer.node.links import (
    AGAIN_PART_MIN,
    AGAIN_SECONDS,
    AGAIN_SECONDS_MAX,
    Credentials,
    Link,
)
from lookup_buffer.node.takes import UNREACHED, Owner
from lookup_buffer.node.turns import Turns
from lookup_buffer.protocol.auth import PROTOCOL_VERSION, Purpose, connect
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import (
    Acknowledge,
    GiveBack,
    Holds,
    Leave,
    OwnerReply,
    Request,
    Stats,
    Take,
)
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import OWNER_IDLE_SECONDS
from nodes import NodeProcess, StartNode, at_rest, handoff, wait_until
from servers import free_port
from store import Location
from virtual_loop import VirtualLoop

NAMESPACE = Namespace.named("tests").fingerprint
PURPOSE = Purpose("handoffs", "tcp://nowhere:1", "node", "boot")


class Asker:
    """A simulated node: it requests hand-offs of `owner`."""

    def __init__(self, owner: NodeProcess, boot: str) -> None:
        host, port = parse_tcp(owner.config.listen)
        purpose = Purpose("handoffs", owner.config.listen, owner.node_id, boot)
        self.link = connect(host, port, token=user_token(), timeout=5.0, purpose=purpose)

    def send(self, request: Request | dict[str, Any]) -> None:
        message = request if isinstance(request, dict) else request.to_wire()
        self.link.send(message, timeout=5.0)

    def receive(self) -> tuple[int, OwnerReply]:
        return OwnerReply.parse(self.link.recv_header(timeout=5.0).header)

    def take(self, name: TensorKey, wait_seconds: float = 0.0, number: int = 1) -> None:
        self.send(Take(number, NAMESPACE, name.text, wait_seconds))


@pytest.fixture(scope="module")
def owner(module_nodes: StartNode) -> NodeProcess:
    return module_nodes(listen=f"tcp://127.0.0.1:{free_port()}", handoff_lease_seconds=30.0)


@pytest.fixture
def producer(owner: NodeProcess) -> Iterator[tuple[NodeProcess, LookupBuffer]]:
    with owner.client() as buffer:
        yield owner, buffer
        wait_until(lambda: owner.stats()["handoff_bytes"] == 0, 5.0)
        at_rest(owner)


Producer = tuple[NodeProcess, LookupBuffer]


def ended(link: FramedSocket) -> bool:
    try:
        link.recv_header(timeout=3.0)
    except LookupBufferError as error:
        return type(error).__name__ in ("PipeClosed", "PipeBroken")
    return False


def test_an_owner_reports_whether_it_has_the_item(producer: Producer) -> None:
    owner, buffer = producer
    name, asker = handoff(), Asker(owner, buffer.boot)
    with asker.link:
        asker.send(Holds(1, NAMESPACE, name.text))
        assert asker.receive() == (1, OwnerReply("absent"))
        buffer.insert(name, torch.ones(3))
        asker.send(Holds(2, NAMESPACE, name.text))
        assert asker.receive() == (2, OwnerReply("present"))
        asker.take(name, number=3)
        _, leased = asker.receive()
        asker.send(Holds(4, NAMESPACE, name.text))
        assert asker.receive() == (4, OwnerReply("present")), "it may be had again"
        asker.send(Acknowledge(5, leased.token))
        assert asker.receive() == (5, OwnerReply("won"))
        asker.send(Holds(6, NAMESPACE, name.text))
        assert asker.receive() == (6, OwnerReply("absent"))


def test_a_take_and_its_acknowledgement(producer: Producer) -> None:
    owner, buffer = producer
    name, asker = handoff(), Asker(owner, buffer.boot)
    with asker.link:
        asker.take(name)
        assert asker.receive() == (1, OwnerReply("absent"))
        buffer.insert(name, torch.arange(10, dtype=torch.uint8))
        asker.take(name, number=2)
        number, answer = asker.receive()
        assert (number, answer.state, answer.nbytes) == (2, "leased", 10)
        assert answer.lease_seconds == pytest.approx(30.0, abs=0.1)
        asker.take(name, number=3)
        assert asker.receive() == (3, OwnerReply("absent")), (
            "another has it, and this one cannot wait"
        )
        for number in (4, 5):
            asker.send(Acknowledge(number, answer.token))
            assert asker.receive() == (number, OwnerReply("won"))
        asker.send(Acknowledge(6, answer.token + 1))
        assert asker.receive() == (6, OwnerReply("lost"))
        with pytest.raises(MissingTensor):
            buffer.drop_select(name)


def test_a_taker_that_leaves_the_queue_gets_an_answer(producer: Producer) -> None:
    owner, buffer = producer
    name, asker = handoff(), Asker(owner, buffer.boot)
    buffer.insert(name, torch.arange(3))
    with asker.link:
        asker.take(name, number=1)
        _, answer = asker.receive()
        asker.take(name, 20.0, number=2)
        asker.send(Leave(3, 2))
        assert asker.receive() == (2, OwnerReply("absent"))
        asker.send(Leave(4, 77))  # no such request
        asker.take(name, 20.0, number=5)
        asker.send(GiveBack(6, answer.token))
        number, again = asker.receive()
        assert (number, again.state) == (5, "leased")
        assert again.token != answer.token
        asker.send(Acknowledge(7, answer.token))
        assert asker.receive() == (7, OwnerReply("lost"))
    assert buffer.drop_select(name, timeout=5.0) is not None, "with the link went what it had"


def test_a_connection_to_an_earlier_boot_is_refused(producer: Producer) -> None:
    owner, _ = producer
    with pytest.raises(NodeRefused, match="the node was started again"):
        Asker(owner, "anotherboot")


@pytest.mark.parametrize(
    "message",
    [
        {"op": "take"},
        {"op": "take", "id": 1, "namespace": NAMESPACE, "key": "shared", "wait_seconds": 0.0},
        {"op": "take", "id": 1, "namespace": "short", "key": "k@1", "wait_seconds": 0.0},
        {"op": "acknowledge", "id": 1, "token": -1},
        {"op": "leave", "id": 1, "take": "1"},
        Stats(1).to_wire(),  # a client's request
        {"id": 1, "state": "won"},
    ],
)
def test_garbage_ends_only_its_own_connection(producer: Producer, message: dict[str, Any]) -> None:
    owner, buffer = producer
    name, before = handoff(), owner.stats().get("protocol_errors", 0)
    hostile, other = Asker(owner, buffer.boot), Asker(owner, buffer.boot)
    buffer.insert(name, torch.arange(3))
    hostile.take(name)
    assert hostile.receive()[1].state == "leased"
    hostile.send(message)
    assert ended(hostile.link)
    assert owner.stats()["protocol_errors"] == before + 1
    with other.link:
        other.take(name, 5.0)
        number, answer = other.receive()
        assert (number, answer.state) == (1, "leased")
        other.send(Acknowledge(2, answer.token))
        assert other.receive() == (2, OwnerReply("won"))


def test_an_unexpected_payload_ends_the_connection(producer: Producer) -> None:
    owner, buffer = producer
    asker = Asker(owner, buffer.boot)
    asker.link.send(Acknowledge(1, 1).to_wire(), memoryview(bytes(100)), timeout=5.0)
    assert ended(asker.link)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"id": 1},
        {"id": True, "state": "won"},
        {"id": 1, "state": "gone"},
        {"id": 1, "state": ["won"]},
        {"id": 1, "state": "leased", "token": 1 << 63},
        {"id": 1, "state": "leased", "lease_seconds": float("nan")},
        {"id": 1, "state": "leased", "generation": -1},
        {"id": 1, "state": "leased", "checksum": 1 << 64},
        {"id": 1, "state": "leased", "nbytes": 1.5},
    ],
)
def test_a_message_that_no_owner_sends_is_refused(answer: object) -> None:
    with pytest.raises(ProtocolError):
        OwnerReply.parse(answer)


class AheadOfTime(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    ahead_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_seconds

    def run_for(self, seconds: float) -> None:
        self.call_later(seconds, self.stop)
        self.run_forever()


AT = Location("node", "boot", 1, 1)
ENDPOINT = "tcp://nowhere:1"
ADDRESS = (NAMESPACE, "k@1")


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> "list[asyncio.Future[Link]]":
    """The connections that are being made; the test completes them."""
    dialled: list[asyncio.Future[Link]] = []

    async def dial(loop: asyncio.AbstractEventLoop, *_: object) -> Link:
        dialled.append(loop.create_future())
        return await dialled[-1]

    monkeypatch.setattr(takes, "dial", dial)
    return dialled


def test_a_connection_stays_until_its_last_lease_ends(
    dialled: "list[asyncio.Future[Link]]",
) -> None:
    """For with the link ends what was taken by way of it."""
    loop = AheadOfTime()
    owner = Owner(AT, ENDPOINT, loop, Credentials(), Turns(loop))
    ours, theirs = socket.socketpair()
    asked = loop.create_task(owner.take(ADDRESS, loop.time() + 1e4))
    loop.run_for(0.1)
    assert len(dialled) == 1
    dialled[0].set_result(Link(ours, PURPOSE, None, PROTOCOL_VERSION))
    loop.run_for(0.1)
    loop.ahead_seconds += 2 * OWNER_IDLE_SECONDS
    idle = [owner.is_idle]  # not while a request waits for its answer
    theirs.sendall(encode_frame({"id": 1, "state": "leased", "lease_seconds": 200.0}))
    loop.run_for(0.2)
    assert asked.result().state == "leased"
    for seconds in (200.0 + OWNER_IDLE_SECONDS - 1.0, 2.0):
        loop.ahead_seconds += seconds
        idle.append(owner.is_idle)
    assert idle == [False, False, True]
    asked = loop.create_task(owner.take(ADDRESS, loop.time() + 5.0))
    loop.run_for(0.1)
    theirs.close()
    loop.run_for(0.2)
    assert asked.result() is UNREACHED, "the request gets that the connection ended"
    loop.close()


def test_a_lease_for_a_request_that_was_cancelled_is_given_back(
    dialled: "list[asyncio.Future[Link]]",
) -> None:
    loop = AheadOfTime()
    owner = Owner(AT, ENDPOINT, loop, Credentials(), Turns(loop))
    ours, theirs = socket.socketpair()
    asked = loop.create_task(owner.take(ADDRESS, loop.time() + 5.0))
    loop.run_for(0.1)
    dialled[0].set_result(Link(ours, PURPOSE, None, PROTOCOL_VERSION))
    loop.run_for(0.1)
    asked.cancel()
    loop.run_for(0.1)
    theirs.sendall(encode_frame({"id": 1, "state": "leased", "token": 7, "lease_seconds": 9.0}))
    loop.run_for(0.2)
    messages = [message for message, _ in FrameDecoder().feed(theirs.recv(1 << 16))]
    assert [message["op"] for message in messages] == ["take", "leave", "give_back"]
    assert messages[2]["token"] == 7
    owner.end(UNREACHED)
    theirs.close()
    loop.close()


def test_a_request_without_an_answer_ends_soon_after_its_deadline(
    dialled: "list[asyncio.Future[Link]]",
) -> None:
    """It leaves the queue at the deadline, and a lease that comes later is given back."""
    loop = AheadOfTime()
    owner = Owner(AT, ENDPOINT, loop, Credentials(), Turns(loop))
    ours, theirs = socket.socketpair()
    asked = loop.create_task(owner.take(ADDRESS, loop.time() + 0.3))
    loop.run_for(0.1)
    dialled[0].set_result(Link(ours, PURPOSE, None, PROTOCOL_VERSION))
    loop.run_for(0.5)
    assert not asked.done()
    loop.run_for(1.0)
    assert asked.result() is UNREACHED
    theirs.sendall(encode_frame({"id": 1, "state": "leased", "token": 7, "lease_seconds": 9.0}))
    loop.run_for(0.2)
    messages = [message for message, _ in FrameDecoder().feed(theirs.recv(1 << 16))]
    assert [message["op"] for message in messages] == ["take", "leave", "leave", "give_back"]
    owner.end(UNREACHED)
    theirs.close()
    loop.close()


def test_attempts_to_connect_are_rate_limited_and_end_with_the_requests(
    dialled: "list[asyncio.Future[Link]]",
) -> None:
    loop, asked = VirtualLoop(), list[asyncio.Task[OwnerReply]]()
    owner = Owner(AT, ENDPOINT, loop, Credentials(), Turns(loop))
    for attempt in range(10):
        asked.append(loop.create_task(owner.take(ADDRESS, loop.time() + 5.0)))
        if attempt:
            longest = min(AGAIN_SECONDS_MAX, AGAIN_SECONDS * 2.0 ** (attempt - 1))
            loop.run(longest * AGAIN_PART_MIN * 0.9)
            assert len(dialled) == attempt, "not yet"
        loop.run(AGAIN_SECONDS_MAX)
        assert len(dialled) == attempt + 1
        dialled[-1].set_exception(PipeBroken("refused"))
        loop.run(0.0)
        assert [one.result() for one in asked] == [UNREACHED] * (attempt + 1)
    left = loop.create_task(owner.take(ADDRESS, loop.time() + 0.001))
    loop.run(0.002)
    assert left.result() is UNREACHED
    loop.run(10.0)
    assert len(dialled) == 10, "no request is left"


def test_a_lease_belongs_to_one_session(producer: Producer) -> None:
    owner, buffer = producer
    name = handoff()
    buffer.insert(name, torch.arange(3))
    with owner.client() as one, owner.client() as other:

        def call(of: LookupBuffer, request: Request) -> dict[str, Any]:
            return of._session.call(request, 5.0)

        taken = call(one, Take(1, NAMESPACE, name.text, 0.0))
        other._session.post(GiveBack(2, taken["token"]))
        assert call(other, Acknowledge(3, taken["token"])) == {"id": 3, "won": False}
        assert call(other, Take(4, NAMESPACE, name.text, 0.0))["reason"] == "taken"
        assert call(one, Acknowledge(5, taken["token"])) == {"id": 5, "won": True}
        assert call(one, Acknowledge(6, taken["token"])) == {"id": 6, "won": True}
        one.release(LoadOrder.of(taken))
