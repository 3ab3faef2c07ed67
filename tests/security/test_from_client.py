"""Another process of the node's user at its socket: what it can make the node wait for, or hold."""

import fcntl
import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol import messages
from lookup_buffer.protocol.fields import COUNT_MAX
from lookup_buffer.protocol.framing import MAX_HEADER_BYTES, encode_frame
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.memory import SEALS, Staging
from nodes import MIB, NodeProcess, StartNode, at_rest, key, tensor_of, wait_until
from patience import scaled
from raw_clients import memfd, pass_on, raw
from servers import patient
from store import COUNTER_MAX
from userfault import unending_read

NAMESPACE = Namespace.named("tests").fingerprint
LINGER_SECONDS = 600
SO_PASSPIDFD = 76
MADV_PAGEOUT, MADV_POPULATE_READ = 21, 22
ARENA_BYTES = 64 * MIB
STATS = encode_frame(messages.Stats(5).to_wire())


@pytest.fixture
def node(start_node: StartNode) -> Iterator[NodeProcess]:
    node = start_node(capacity_bytes=ARENA_BYTES)
    files = node.open_files()
    yield node
    at_rest(node, open_files=files)


# -- staging


def insert(nbytes: int, number: int = 2, offset: int = 0) -> messages.Insert:
    header = TensorHeader("uint8", (nbytes,), nbytes).to_fields()
    return messages.Insert(number, NAMESPACE, [key().text], [header], [offset], None, 0.0)


def allocated_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def resident_bytes(node: NodeProcess) -> int:
    return int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("filled_bytes", [0, 5 * MIB], ids=["empty", "with a hole"])
@pytest.mark.parametrize("nbytes", [100, 2 * MIB, 32 * MIB])
def test_holes_are_zeros_and_stay_holes(node: NodeProcess, nbytes: int, filled_bytes: int) -> None:
    """To touch one in a mapping would allocate its page, on the node's account."""
    descriptor = memfd(32 * MIB, filled_bytes=filled_bytes)
    offset = max(0, filled_bytes - 10) if nbytes < MIB * 32 else 0
    filled = min(nbytes, filled_bytes - offset)
    with raw(node) as client:
        client.ask(messages.Stage(1), [descriptor])
        before = allocated_bytes(descriptor)
        stored = client.ask(insert(nbytes, offset=offset))["results"][0]
        assert stored["outcome"] == "stored"
        assert stored["checksum"] == xxh3_64_intdigest(b"x" * filled + bytes(nbytes - filled))
        assert allocated_bytes(descriptor) == before
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [400_000, 16 * MIB], ids=["on the loop", "on a thread"])
def test_pages_that_the_kernel_has_dropped_stay_away(node: NodeProcess, nbytes: int) -> None:
    """Such as were read and never written: it drops them though no hole can be punched. The node
    took them for written, and allocated them anew: 17 areas, and it was killed for its memory."""
    descriptor = memfd(16 * MIB)
    with raw(node) as client, mmap.mmap(descriptor, 16 * MIB, prot=mmap.PROT_READ) as area:
        area.madvise(MADV_POPULATE_READ)
        assert allocated_bytes(descriptor) == 16 * MIB
        client.ask(messages.Stage(1), [descriptor])
        client.ask(insert(100, offset=16 * MIB - 100))
        area.madvise(MADV_PAGEOUT)
        left = allocated_bytes(descriptor)
        if left == 16 * MIB:
            pytest.skip("this kernel keeps them")
        again = client.ask(insert(nbytes, number=3))
        assert again["results"][0]["outcome"] in ("stored", "exists")
        assert allocated_bytes(descriptor) <= left
    os.close(descriptor)


def test_a_client_that_holds_the_locks_of_its_area_stops_nobody(node: NodeProcess) -> None:
    """Those of the open file: the node's loop waited for them, and no signal ended it."""
    area = memfd(MIB, filled_bytes=MIB)
    descriptor = os.open(f"/proc/self/fd/{area}", os.O_RDONLY)  # with a position that has a lock
    with raw(node) as client:
        client.ask(messages.Stage(1), [descriptor])
        with unending_read(descriptor):
            stored = client.ask(insert(100))
            assert stored["results"][0]["outcome"] == "stored"
            assert node.stats()
    os.close(descriptor)
    os.close(area)


def test_sparse_areas_of_many_connections_cost_nothing(node: NodeProcess) -> None:
    node.stats()
    before = resident_bytes(node)
    for _ in range(6):
        descriptor = memfd(2 * ARENA_BYTES)
        with raw(node) as client:
            client.ask(messages.Stage(1), [descriptor])
            client.ask(insert(100, offset=2 * ARENA_BYTES - 100))
            assert allocated_bytes(descriptor) == 0
        os.close(descriptor)
    assert resident_bytes(node) - before < 8 * MIB


@pytest.mark.parametrize("mode", [os.O_WRONLY, os.O_WRONLY | os.O_RDWR], ids=["written", "none"])
def test_an_area_that_cannot_be_read_is_refused(node: NodeProcess, mode: int) -> None:
    """Each insert from it was logged as a bug of the node."""
    area = memfd(MIB, filled_bytes=MIB)
    descriptor = os.open(f"/proc/self/fd/{area}", mode)
    with raw(node) as client:
        client.send(messages.Stage(1), [descriptor])
        assert client.ended()
    os.close(descriptor)
    os.close(area)


def test_an_area_whose_size_could_change_is_refused(node: NodeProcess) -> None:
    for seals in (0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_SHRINK):
        descriptor = memfd(MIB, seals, filled_bytes=MIB)
        with raw(node) as client:
            client.send(messages.Stage(1), [descriptor])
            assert client.ended()
        os.close(descriptor)


def test_areas_are_not_memory_of_the_node(node: NodeProcess) -> None:
    """Filled ones, of many connections of one session; each can be used again."""
    node.stats()
    before, area_bytes = resident_bytes(node), 16 * MIB
    with ExitStack() as stack:
        main = stack.enter_context(raw(node))
        clients = []
        for number in range(12):
            client = stack.enter_context(raw(node, session=False))
            client.ask(messages.Join(1, main.session))
            descriptor = memfd(area_bytes, filled_bytes=area_bytes)
            assert client.ask(messages.Stage(2), [descriptor]) == {"id": 2}
            os.close(descriptor)
            stored = client.ask(insert(area_bytes, number))
            assert stored["results"][0]["outcome"] == "stored"
            clients.append(client)
        assert resident_bytes(node) - before < ARENA_BYTES + 8 * MIB
        for number, client in enumerate(clients):
            assert client.ask(insert(area_bytes, number))["results"][0]["outcome"] == "stored"
        assert resident_bytes(node) - before < ARENA_BYTES + 8 * MIB


def test_an_area_does_not_change_under_an_insert(node: NodeProcess) -> None:
    """The insert of a large area is answered later: it was dropped without an answer."""
    first, second = (memfd(32 * MIB, filled_bytes=32 * MIB) for _ in range(2))
    with raw(node) as client:
        client.ask(messages.Stage(1), [first])
        inserting = encode_frame(insert(16 * MIB).to_wire())
        pass_on(client, inserting + encode_frame(messages.Stage(3).to_wire()), [second])
        assert client.ended()
    assert node.stats()["protocol_errors"] == 1
    os.close(first)


def test_the_control_of_the_staging_attacks(node: NodeProcess) -> None:
    """What a client does itself: an area of twice the size that it has filled so far."""
    with raw(node) as client:
        staging = Staging(32 * MIB)
        staging.view[: 9 * MIB] = bytes(9 * MIB)
        client.ask(messages.Stage(1), [staging.fd])
        for nbytes in (100, 5 * MIB, 9 * MIB):
            assert client.ask(insert(nbytes))["results"][0]["outcome"] == "stored"
        staging.view[9 * MIB : 17 * MIB] = bytes(8 * MIB)
        assert client.ask(insert(17 * MIB))["results"][0]["outcome"] == "stored"
        assert client.ask(insert(32 * MIB))["results"][0]["outcome"] == "stored"
        client.send(insert(32 * MIB + 1))
        assert client.ended()
        staging.close()


# -- frames


def test_a_large_frame_before_hello_is_refused_at_its_start(node: NodeProcess) -> None:
    for number, nbytes in enumerate((4 << 20, 64 << 10)):
        with raw(node, session=False) as client:
            client.socket.sendall(struct.pack(">4sIQ", b"LB01", nbytes, 0))
            assert client.ended(scaled(10.0))
        # Not for its silence, which is no error.
        assert node.stats().get("protocol_errors", 0) == number + 1


def test_a_frame_that_no_client_sends_is_refused_at_its_start(node: NodeProcess) -> None:
    """To check 4 MiB held the loop for 0.8 s; clients refuse to send more than 1 MiB."""
    before = node.stats().get("protocol_errors", 0)
    with raw(node) as client:
        client.socket.sendall(struct.pack(">4sIQ", b"LB01", MAX_HEADER_BYTES + 1, 0))
        assert client.ended(scaled(10.0))
    assert node.stats()["protocol_errors"] == before + 1
    with raw(node) as client:
        client.socket.sendall(struct.pack(">4sIQ", b"LB01", MAX_HEADER_BYTES, 0))
        assert not client.ended(0.5), "the control: it waits for the header"


def test_a_session_may_send_large_frames(node: NodeProcess) -> None:
    """The control: as many keys as one request may have, on both kinds of connection."""
    question = messages.Contains(3, NAMESPACE, [f"{n}".ljust(60, "x") for n in range(4000)], 0.0)
    with raw(node) as main, raw(node, session=False) as other:
        other.ask(messages.Join(2, main.session))
        for client in (main, other):
            frame = encode_frame(question.to_wire())
            sending = threading.Thread(target=client.socket.sendall, args=[frame])
            sending.start()
            found = client.socket.recv(65536)
            sending.join()
            assert found


# -- the log


@pytest.mark.parametrize("text", ["\n2026-01-01 lookup-buffer ERROR: forged", "\x1b[2J", "\u202e"])
def test_a_raw_key_forges_no_line_of_the_log(start_node: StartNode, text: str) -> None:
    """A hand-off that is taken is logged with its key."""
    node = start_node(log_level="info")
    header = TensorHeader.of_none().to_fields()
    name = f"k{text}@r"
    with raw(node) as client, suppress(AssertionError, ConnectionError):
        client.ask(messages.Insert(2, NAMESPACE, [name], [header], [0], 60.0, 1.0))
        taken = client.ask(messages.Take(3, NAMESPACE, name, 1.0))
        client.ask(messages.Acknowledge(4, taken["token"]))
        wait_until(lambda: "hand-off taken" in node.log_text(), 5.0)
    assert text not in node.log_text()


def test_what_others_chose_stays_in_its_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it is, and wherever it comes from."""
    hostile = "k\n2026-01-01 lookup-buffer ERROR: forged \x1b[2J\u202e"
    program = (
        "import logging, sys\n"
        "from lookup_buffer.runtime import start_log\n"
        "start_log('info')\n"
        "logging.getLogger('x').warning('one %s, and é', sys.argv[1])\n"
        "try:\n    raise ValueError(sys.argv[1])\n"
        "except ValueError:\n    logging.getLogger('x').exception('two')\n"
    )
    subprocess.run([sys.executable, "-c", program, hostile], check=True)
    first, second, *trace = capfd.readouterr().err.splitlines()
    assert first.endswith(
        r"WARNING: one k\n2026-01-01 lookup-buffer ERROR: forged \x1b[2J\u202e, and é"
    )
    assert second.endswith("ERROR: two")
    assert trace
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


# -- what it reports


def test_reads_without_number_leave_the_counters_readable(node: NodeProcess) -> None:
    """Their bytes together are more than a message can hold."""
    nbytes, name = 16 * MIB, key()
    count = (1 << 64) // (nbytes * COUNT_MAX) + 1
    with raw(node) as client, node.client() as other:
        other.insert(name, tensor_of("x", nbytes))
        for number in range(count):
            client.send(messages.Touch(2 + number, NAMESPACE, {name.text: COUNT_MAX}))
        values = client.ask(messages.Metrics(1))["values"]
        assert values["bytes_hit_local"] == COUNTER_MAX
        assert values["hits_local"] == count * COUNT_MAX
    assert node.stats()["bytes_hit_local"] == COUNTER_MAX
    with patient(str(node.settings.store_url)) as store:

        def written() -> int | None:
            return store.stats().get(node.node_id, {}).get("bytes_hit_local")

        wait_until(lambda: written() == COUNTER_MAX, 10.0)


def test_many_clients_insert_and_read_as_before(node: NodeProcess) -> None:
    """The control of all: the node that was attacked serves."""
    with node.client() as client:
        for nbytes in (0, 10, 100_000, 3 * MIB, 20 * MIB):
            name, value = key(), tensor_of("x", nbytes)
            client.insert(name, value)
            found = client.select(name)
            assert found is not None
            assert found.equal(value)
