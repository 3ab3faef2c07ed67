"""Hostile frames from a grammar, for every socket: unix, node to node, pipes, HTTP.

The grammar knows the requests and the checks of their fields, so most frames get past the parser
and meet what lies behind it. A sequence of frames is one connection: valid ones with values that
make no sense here, and at its end either a question, which must be answered, or something that no
frame may be, after which the connection must be closed. All follow from the seed and the number of
the sequence.

After each batch of sequences the node must serve others as before. What it does not survive is
kept in `build/torture/found`, in the form of `tests/support/hostile`: where it belongs once it is
mended.
"""

import queue
import random
import select
import socket
import string
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from lookup_buffer.config import parse_address
from lookup_buffer.errors import LookupBufferError, PipeError
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.auth import Purpose, request_handshake
from lookup_buffer.protocol.fields import (
    CHECKS,
    EXCHANGED_BYTES,
    KEYS_MAX,
    LANES,
    SECONDS_MAX,
    TEXT_MAX,
    Fallback,
)
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame, pack
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Request, field_names
from lookup_buffer.protocol.tls import Tls
from nodes import MIB, ROOT, NodeProcess, at_rest, wait_until
from observing import address_of, get
from patience import scaled
from raw_ends import hostile
from test_pipe_hostile import over_socket
from torture_fleet import private_bytes
from torture_totals import Finding, Totals

FOUND = ROOT / "build" / "torture" / "found"
FRAMES_MAX = 600
"""Of one sequence."""
POOL = 4_000
"""So many different frames, from which the sequences of a round are put together."""
BATCH = 40
"""Sequences between two looks at whether all is well."""
ANSWER_SECONDS = 10.0
MEMORY_MAX = 96 * MIB
"""By so much the node may grow beyond what it was when it had served a few."""
CONTROL = Namespace.named("control")

Make = Callable[[random.Random], Any]
EDGES = (0, 1, 2, 127, 255, 1 << 16, (1 << 31) - 1, (1 << 31), (1 << 53), (1 << 63) - 1)
NAMESPACES = ("0" * 64, "f" * 64, CONTROL.fingerprint)


def _text(chance: random.Random) -> str:
    length = chance.choice((1, 3, 5, 20, 64, chance.randrange(1, 300)))
    if chance.random() < 0.005:
        length = TEXT_MAX
    if chance.random() < 0.3:
        return f"k{chance.randrange(50)}"
    alphabet = string.printable + "@%\x00\u00e9\u20ac\U0001f600"
    return "".join(chance.choices(alphabet, k=length))


def _key(chance: random.Random) -> str:
    text = "".join(char for char in _text(chance) if char.isascii() and char.isprintable())
    return text or "k"


def _count(chance: random.Random) -> int:
    return chance.choice(EDGES) if chance.random() < 0.5 else chance.randrange(1, 5_000)


def _seconds(chance: random.Random) -> float:
    """Mostly none: what waits is cancelled when its connection ends."""
    return chance.choice((0, 0.0, 0.001, 0.01, 1e-9, 0.5, SECONDS_MAX))


def _many(make: Make) -> Make:
    def made(chance: random.Random) -> list[Any]:
        most = KEYS_MAX if chance.random() < 0.002 else chance.choice((0, 1, 2, 8, 40))
        return [make(chance) for _ in range(most)]

    return made


def _map(make: Make) -> Make:
    return lambda chance: {_text(chance): make(chance) for _ in range(chance.randrange(6))}


def _header(chance: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = TensorHeader.for_tensor("uint8", (chance.randrange(99),)).to_fields()
    if chance.random() < 0.5:
        fields[chance.choice([*fields, "more"])] = anything(chance)
    return fields


def _hexadecimal(digits: int) -> Make:
    return lambda chance: f"{chance.getrandbits(4 * digits):0{digits}x}"


FIELDS: dict[str, Make] = {
    "id": _count,
    "version": lambda chance: chance.choice((messages.VERSION, messages.VERSION + 1, 0)),
    "seat": lambda chance: chance.choice(
        (None, ["engine", 0, 1, True, ""], ["e", None, 4096, False, "cuda:0"])
    ),
    "expects": _map(_count),
    "session": _count,
    "namespace": lambda chance: chance.choice(NAMESPACES),
    "key": _key,
    "keys": _many(_key),
    "budget_seconds": lambda chance: chance.choice((None, _seconds(chance))),
    "headers": _many(_header),
    "offsets": _many(_count),
    "ttl_seconds": lambda chance: chance.choice((None, 0, 0.5, SECONDS_MAX)),
    "wait_seconds": _seconds,
    "lease_seconds": _seconds,
    "state": lambda chance: chance.choice(("intent", "encoding")),
    "waiter": _count,
    "claimer": _count,
    "prefetch": _count,
    "indexes": _many(_count),
    "tickets": _many(_count),
    "reads": lambda chance: {_key(chance): chance.randrange(1, 1 << 31) for _ in range(4)},
    "token": _count,
    "take": _count,
    "rank": _count,
    "parts": _map(_text),
    "lane": lambda chance: chance.choice(LANES),
    "library": _hexadecimal(8),
    "port": lambda chance: chance.randrange(1, 1 << 16),
    "pool": _hexadecimal(12),
    "pool_bytes": _count,
    "receives": lambda chance: chance.random() < 0.5,
    "offers": lambda chance: chance.random() < 0.5,
    "checksum": lambda chance: chance.getrandbits(64),
    "mark": lambda chance: chance.randrange(1, 1 << 53),
    "ticket": _count,
    "reason": lambda chance: chance.choice(["", *Fallback]),
    "source": lambda chance: chance.randrange(5),
    "dialler": _text,
    "node": _text,
    "boot": _hexadecimal(16),
    "data": lambda chance: chance.randbytes(chance.choice((0, 1, EXCHANGED_BYTES))),
}
"""A valid value of each field: those of `lookup_buffer.protocol.fields.CHECKS`."""
ENDING = {"hello", "join", "stage", "insert", "goodbye", "metrics", "leave", "holds"}
ENDING |= {"ask_dial_back", "dial_back", "exchange"}
"""Requests that end the connection of a client without a staging area, or that only nodes send."""
CLIENT_KINDS: list[type[Request]] = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Request) and kind is not Request
    if kind.op not in ENDING
]
CHEAP_KINDS = [messages.Release, messages.Touch, messages.Done, messages.GiveBack, messages.Retract]
"""Those that the node answers by itself; others ask the store, or begin something that waits."""
OWNER_KINDS: list[type[Request]] = [
    messages.Take, messages.Acknowledge, messages.GiveBack, messages.Leave, messages.Holds,
]  # fmt: skip


def anything(chance: random.Random, depth: int = 0) -> Any:
    """Plain data of any type."""
    kind = chance.randrange(9 if depth < 3 else 7)
    if kind < 7:
        number = chance.choice(EDGES)
        odd = chance.choice((0.0, 1e308, float("nan"), float("inf")))
        data = chance.randbytes(chance.randrange(40))
        return (None, True, number, -number, odd, _text(chance), data)[kind]
    some = [anything(chance, depth + 1) for _ in range(chance.randrange(5))]
    return some if kind == 7 else {str(number): one for number, one in enumerate(some)}


def request(chance: random.Random, kinds: Sequence[type[Request]]) -> dict[str, Any]:
    kind = chance.choice(kinds)
    made = {"op": kind.op} | {name: FIELDS[name](chance) for name in field_names(kind)}
    if kind is messages.Take:  # of another key it is refused as no request at all
        made["key"] = f"k{chance.randrange(50)}@{chance.randrange(50)}"
    return made


def spoiled(chance: random.Random, valid: dict[str, Any]) -> bytes:
    """A frame that must be refused: one field of another type, or bytes that are no frame."""
    way = chance.randrange(6)
    if way == 0:
        name = chance.choice(list(valid))
        wrong = anything(chance)
        while name in CHECKS and CHECKS[name](wrong):
            wrong = anything(chance)
        return encode_frame(valid | {name: ["bad"] if name == "op" else wrong})
    if way == 1:
        return encode_frame(valid | {"more": anything(chance)})
    if way == 2:
        return encode_frame({name: valid[name] for name in list(valid)[:-1]})
    if way == 3:
        return chance.choice(GARBAGE)
    if way == 4:
        return encode_frame(valid, payload_nbytes=chance.choice((1, 1 << 40, (1 << 64) - 1)))
    packed = pack(valid)
    changed = bytearray(packed)
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    changed += bytes([0xC1])  # never used by msgpack, and behind the end
    return struct.pack(">4sIQ", b"LB01", len(changed), 0) + changed


GARBAGE = list(hostile("frames", "node").values())


# -- the sockets


@dataclass
class Target:
    """A kind of socket of `node`. `send_all` sends one sequence and returns why that went wrong."""

    node: NodeProcess
    seed: int
    pool: list[bytes] = field(default_factory=list)
    last: list[bytes] = field(default_factory=list)
    """The sequences of this batch, as they were sent."""
    name: ClassVar[str]

    def sequence(self, number: int) -> tuple[random.Random, list[bytes]]:
        """Frames of one connection, but for its end."""
        chance = random.Random(f"{self.name} {self.seed} {number}")
        count = chance.choice((0, 1, 5, 60, FRAMES_MAX))
        return chance, chance.choices(self.pool, k=count)

    def __post_init__(self) -> None:
        chance = random.Random(f"{self.name} {self.seed}")
        self.pool = [self.frame(chance) for _ in range(POOL)]

    def frame(self, chance: random.Random) -> bytes:
        raise NotImplementedError

    def send_all(self, number: int) -> tuple[int, str]:
        """How many frames were sent; why what came back is wrong, or an empty text."""
        raise NotImplementedError


AHEAD_MAX = 12
"""Requests of a reader that are not answered yet: with a few more its connection is closed."""
QUESTION_ID = 77
QUESTION = encode_frame(messages.Stats(QUESTION_ID).to_wire())


class UnixTarget(Target):
    """A client's socket. Also sequences before a hello."""

    name = "unix"

    def frame(self, chance: random.Random) -> bytes:
        kinds = CLIENT_KINDS if chance.random() < 0.1 else CHEAP_KINDS
        return encode_frame(request(chance, kinds))

    def send_all(self, number: int) -> tuple[int, str]:
        chance, frames = self.sequence(number)
        asks = chance.random() < 0.5
        end = QUESTION if asks else spoiled(chance, request(chance, CLIENT_KINDS))
        greets = chance.random() < 0.9
        if not greets:
            asks = False  # without a session no request is answered
        self.last.append(b"".join([*frames, end]))
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(ANSWER_SECONDS)
            stream.connect(str(self.node.socket_path))
            if greets:
                expects = self.node.config.expectations()
                stream.sendall(
                    encode_frame(messages.Hello(1, messages.VERSION, None, expects).to_wire())
                )
                if not stream.recv(1 << 16):  # its descriptors are dropped
                    return 1, "no session"
            return len(frames) + 1, exchanged(stream, self.last[-1], asks)


class NodeTarget(Target):
    """The port for other nodes, as a reader of tensors or as a taker of hand-offs."""

    name = "node"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.node.settings.listen is not None
        self._endpoint = self.node.settings.listen
        with self.node.client() as client:
            self._boot = client.boot

    def frame(self, chance: random.Random) -> bytes:
        return encode_frame(request(chance, OWNER_KINDS))

    def send_all(self, number: int) -> tuple[int, str]:
        chance, frames = self.sequence(number)
        way = chance.randrange(4)
        stream = self._connected()
        if way == 0:  # without a handshake
            data = chance.choice([*GARBAGE, chance.randbytes(200), *frames[:1]])
            self.last.append(data)
            with stream:
                return 1, exchanged(stream, data, False)
        if way == 1:
            purpose = self._purpose("handoffs", self._boot)
            end = spoiled(chance, request(chance, OWNER_KINDS))
        else:
            purpose = self._purpose("tensors", "")
            frames = [encode_frame(self._get(chance)) for _ in range(min(len(frames), AHEAD_MAX))]
            end = chance.choice([*GARBAGE, encode_frame(request(chance, OWNER_KINDS))])
        self.last.append(b"".join([*frames, end]))
        try:
            token = self.node.settings.read_peer_token()
            link = request_handshake(stream, token=token, timeout=ANSWER_SECONDS, purpose=purpose)
        except PipeError:  # a busy node drops handshakes that take too long
            return 1, ""
        try:
            return len(frames) + 1, exchanged(stream, self.last[-1], False)
        finally:
            link.abort()

    def _connected(self) -> socket.socket:
        return socket.create_connection(parse_address(self._endpoint), ANSWER_SECONDS)

    def _purpose(self, role: str, boot: str) -> Purpose:
        return Purpose(role, self._endpoint, self.node.node_id, boot)

    def _get(self, chance: random.Random) -> dict[str, Any]:
        items = [
            [chance.choice(NAMESPACES), _key(chance), FIELDS["boot"](chance), _count(chance)]
            for _ in range(chance.choice((1, 2, 30, 256)))
        ]
        return {"op": "get", "items": items}


class TlsTarget(NodeTarget):
    """The same port by TLS, with a valid certificate."""

    name = "tls"

    def __post_init__(self) -> None:
        super().__post_init__()
        files = self.node.settings.tls_files()
        assert files is not None
        self._tls = Tls(files, self.node.node_id)

    def _connected(self) -> socket.socket:
        return self._tls.connected(super()._connected(), self.node.node_id, ANSWER_SECONDS)

    def _purpose(self, role: str, boot: str) -> Purpose:
        return super()._purpose(role, boot)._replace(client=self.node.node_id)


PIPE_HOSTILE = list(hostile("frames", "pipe").values())
SCHEMES = ("tcp", "shm", "gloo")


class PipeTarget(Target):
    """Ends of pipes, in this process; each sequence has an end of its own."""

    name = "pipe"

    def frame(self, chance: random.Random) -> bytes:
        small = TensorHeader.for_tensor("uint8", (4,)).to_fields()
        large = TensorHeader.for_tensor("float32", (1 << 20,)).to_fields()
        number = chance.choice((1, 2, 3, 1 << 40))
        key = chance.choice((None, b"k", chance.randbytes(chance.randrange(200))))
        return chance.choice((
            lambda: encode_frame(["beat"]),
            lambda: encode_frame(["offer", number, key, small], 4) + b"abcd",
            lambda: encode_frame(["offer", number, key, large]),
            lambda: encode_frame(["offer", number, key, large, 0]),
            lambda: encode_frame(["withdraw", number, key]),
            lambda: encode_frame(["pull", number]),
            lambda: encode_frame(["data", number], 4) + b"abcd",
            lambda: encode_frame(["gone", number]),
            lambda: encode_frame(["received", number]),
            lambda: encode_frame(["pair", _text(chance), chance.randbytes(9)]),
            lambda: encode_frame([_text(chance), anything(chance)]),
            lambda: encode_frame(["offer", *(anything(chance) for _ in range(3))]),
            lambda: encode_frame([chance.choice(("pull", "data")), anything(chance)]),
        ))()  # fmt: skip

    def send_all(self, number: int) -> tuple[int, str]:
        chance, frames = self.sequence(number)
        if chance.random() < 0.7:  # beats are answered by none, and end nothing
            frames = [encode_frame(["beat"])] * len(frames) + frames[:3]
        self.last.append(b"".join([*frames, chance.choice(PIPE_HOSTILE)]))
        with ExitStack() as closing:
            attacked, theirs = over_socket(chance.choice(SCHEMES), closing)
            theirs.settimeout(ANSWER_SECONDS)
            with suppress(ConnectionError):
                attacked.send(self.last[-1])
            theirs.close()
            try:
                attacked.reason()
            except queue.Empty:
                return len(frames) + 1, "neither refused nor closed"
            return len(frames) + 1, ""


HEADERS = (
    b"Host: localhost", b"Host: a", b"Content-Length: 99999999999", b"Content-Length: -1",
    b"Transfer-Encoding: chunked", b"Accept: " + b"*" * 3000, b"Range: bytes=0-", b"nothing",
)  # fmt: skip


class HttpTarget(Target):
    """Requests for pages and metrics: one a connection, which the server then closes."""

    name = "http"

    def frame(self, chance: random.Random) -> bytes:
        method = chance.choice((b"GET", b"POST", b"HEAD", b"get", chance.randbytes(3)))
        path = chance.choice((b"/", b"/metrics", b"/healthz", b"/why?key=", b"/events", b"/.."))
        path += chance.randbytes(9) if chance.random() < 0.2 else b""
        version = chance.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"", b"\0"))
        odd = (b"Authorization: Bearer " + chance.randbytes(8), b"X: " + chance.randbytes(30))
        headers = chance.choices((*HEADERS, *odd), k=chance.randrange(5))
        end = chance.choice((b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n", b""))
        end += chance.randbytes(50) if chance.random() < 0.2 else b""
        return method + b" " + path + b" " + version + b"\r\n" + b"\r\n".join(headers) + end

    def send_all(self, number: int) -> tuple[int, str]:
        chance, _ = self.sequence(number)
        data = chance.choice(self.pool)
        self.last.append(data)
        with socket.create_connection(address_of(self.node), ANSWER_SECONDS) as stream:
            with suppress(OSError):
                stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)
            if b"/events" in data:  # a stream without an end
                return 1, ""
            return 1, read_to_end(stream)


TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (UnixTarget, NodeTarget, TlsTarget, PipeTarget, HttpTarget)
}
SOCKETS = tuple(TARGETS)


def exchanged(stream: socket.socket, data: bytes, asks: bool) -> str:
    """Send `data`, reading what comes; then either the question is answered or all is closed."""
    decoder = FrameDecoder(max_header_bytes=64 * MIB, max_payload_bytes=1 << 62)
    closed = "closed before the question" if asks else ""
    stream.setblocking(False)
    left, deadline = memoryview(data), time.monotonic() + scaled(ANSWER_SECONDS)
    while time.monotonic() < deadline:
        readable, writable, _ = select.select([stream], [stream] if left else [], [], 0.1)
        if writable:
            try:
                left = left[stream.send(left) :]
            except BlockingIOError:
                pass
            except OSError:
                left = memoryview(b"")  # it is closed; what it still said can be read
        if not readable:
            continue
        try:
            read = stream.recv(1 << 18)
        except OSError:
            return closed
        if not read:
            return closed
        if asks and any(_answers(frame.header) for frame in decoder.feed(read)):
            return ""
    return "neither answered nor closed"


def _answers(header: Any) -> bool:
    return isinstance(header, dict) and header.get("id") == QUESTION_ID and "stats" in header


def read_to_end(stream: socket.socket) -> str:
    try:
        while stream.recv(1 << 16):
            pass
    except TimeoutError:
        return "not closed"
    except OSError:
        pass
    return ""


# -- the round


def attack(node: NodeProcess, name: str, seed: int, seconds: float) -> Totals:
    """Sequences for so long, and after each batch a look at the node."""
    totals = Totals()
    target = TARGETS[name](node, seed)
    if name == "http":
        wait_until(lambda: get(node, "/healthz")[0] == 200, 20.0, "the node joins")
    files = node.open_files()
    numbers = iter(range(1 << 40))
    until = time.monotonic() + seconds
    before = 0
    while time.monotonic() < until and not totals.findings:
        for _ in range(BATCH):
            number = next(numbers)
            frames, wrong = _sent(target, number)
            totals.count(f"frames: {name}", frames)
            totals.count(f"sequences: {name}")
            if wrong:
                _keep(totals, target, f"sequence {number}: {wrong}")
                break
        wrong = _unwell(node, target)
        before = before or private_bytes(node.pid)
        grown = private_bytes(node.pid) - before
        totals.peak(f"memory growth under hostile frames ({name}), MiB", grown / MIB)
        if grown > MEMORY_MAX:
            wrong = f"grew by {grown / MIB:.0f} MiB"
        if wrong and not totals.findings:
            _keep(totals, target, wrong)
        target.last.clear()
    try:
        at_rest(node, open_files=files, seconds=10.0)
    except pytest.fail.Exception as error:
        totals.findings.append(Finding("gauge", f"fuzz {name}", seed, str(error)))
    totals.count("nodes found at rest")
    return totals


def _sent(target: Target, number: int) -> tuple[int, str]:
    try:
        return target.send_all(number)
    except (LookupBufferError, OSError) as error:
        return 0, f"{type(error).__name__}: {error}"


def _unwell(node: NodeProcess, target: Target) -> str:
    """Why the node does not serve others as before; empty if it does."""
    if not node.alive():
        return f"the node ended: {node.log_text()[-2000:]}"
    if "Traceback" in (log := node.log_text()):
        return f"logged {log[log.index('Traceback') :][:2000]}"
    try:
        with node.client("control") as client:
            key = TensorKey(f"control-{target.seed}-{time.monotonic_ns()}")
            client.insert(key, torch.ones(3))
            if not torch.equal(client.select(key), torch.ones(3)):  # type: ignore[arg-type]
                return "wrong bytes for another client"
    except LookupBufferError as error:
        return f"another client gets {type(error).__name__}: {error}"
    return ""


def _keep(totals: Totals, target: Target, why: str) -> None:
    FOUND.mkdir(parents=True, exist_ok=True)
    name = f"{target.name}-{target.seed}"
    for number, data in enumerate(target.last[-3:]):
        path = FOUND / f"{name}-{number}.hex"
        first = f"# {' '.join(why.split())[:200]} (seed {target.seed})\n"
        path.write_text(first + data.hex(" ") + "\n")
    totals.findings.append(Finding("other", f"fuzz {target.name}", target.seed, why))
    print(f"FOUND in fuzz {target.name}, seed {target.seed}: {why}", flush=True)


assert set(FIELDS) == set(CHECKS), "the grammar has a value for each field"
