"""Transfers between nodes by TLS beside plain ones, and beside bare sockets of both kinds.

Starts a Valkey and two nodes, one at a tcp:// and one at a tls:// address. A fetcher in this
process reads from each, as another node would. In interleaved rounds, medians, for each size:

- `plain`, `tls`: from the fetcher's request until the bytes are verified in the arena;
- `bare`, `bare_tls`: `sendall` in another process, `recv_into` here into warm memory, Python's own
  sockets; TLS 1.3 with the same certificates;

and medians of per-round ratios of their speeds.

    python -m benchmarks.tls [--rounds 9]
"""

import argparse
import asyncio
import datetime
import functools
import json
import multiprocessing
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.node import SIZE, bytes_tensor, receive_bare, seconds, transfer, wait_until_gone
from lookup_buffer import BufferConfig, LookupBuffer, Namespace, TensorKey
from lookup_buffer.access import user_token
from lookup_buffer.cli.certificates import Authority
from lookup_buffer.config import TLS_FILES, TlsFiles
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located
from lookup_buffer.node.transfer import FETCH_OWNER, Fetcher
from lookup_buffer.protocol.tls import Tls
from store import EmbeddedServer, open_store

if TYPE_CHECKING:
    from lookup_buffer.node.items import Pin

SIZES_BYTES = (8 << 20, 64 << 20)
CAPACITY_BYTES = 512 << 20
RATIOS = (("tls", "plain"), ("tls", "bare_tls"), ("bare_tls", "bare"), ("plain", "bare"))


def certified(folder: Path, *names: str) -> dict[str, TlsFiles]:
    authority, year = Authority.of(folder), datetime.timedelta(days=365)
    return {
        name: TlsFiles(*authority.certify(name, folder, year), folder / "authority.pem")
        for name in names
    }


def serve_bare(port: Any, files: TlsFiles | None) -> None:
    """The other process of a bare socket."""
    payload = memoryview(bytearray(b"\xa5" * max(SIZES_BYTES)))
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        stream = context.wrap_socket(stream, server_side=True)
    while request := stream.recv(SIZE.size):
        stream.sendall(payload[: SIZE.unpack(request)[0]])


@contextmanager
def bare(files: TlsFiles | None) -> Iterator[socket.socket]:
    process_context = multiprocessing.get_context("spawn")
    port, sender = process_context.Pipe()
    process = process_context.Process(target=serve_bare, args=(sender, files), daemon=True)
    process.start()
    stream = socket.create_connection(("127.0.0.1", port.recv()))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if files is not None:
        context = ssl.create_default_context(cafile=files.authority)
        context.check_hostname = False
        stream = context.wrap_socket(stream)
    with stream:
        yield stream
    process.join(10.0)


def received(stream: socket.socket, target: memoryview) -> float:
    return seconds(functools.partial(receive_bare, stream, target))


class Holder:
    """A node, and a fetcher here that reads from it."""

    def __init__(
        self, directory: Path, url: str, node: str, files: Mapping[str, TlsFiles] | None
    ) -> None:
        settings: dict[str, Any] = {}
        credentials = Credentials(user_token())
        if files is not None:
            settings = dict(zip(TLS_FILES, files[node], strict=True))
            settings["listen"] = "tls://127.0.0.1:0"
            credentials = Credentials(None, Tls(files["reader"], "reader"))
        self._url, self._node = url, node
        self._client = LookupBuffer(
            BufferConfig(
                directory=directory / node, node_id=node, capacity_bytes=CAPACITY_BYTES,
                store_url=url, idle_exit_seconds=2.0, **settings,
            )
        )  # fmt: skip
        self._arena = Arena(3 * max(SIZES_BYTES), lambda address, reason: None)
        self._arena.memory.populate(0, self._arena.memory.nbytes)
        self._loop = asyncio.new_event_loop()
        self._fetcher = Fetcher(self._loop, self._arena, Counters(), credentials)

    def insert(self, nbytes: int) -> Callable[[], float]:
        """Returns what fetches it, in seconds."""
        key = TensorKey(f"{self._node}-{nbytes}")
        self._client.insert(key, bytes_tensor(nbytes))
        address = (Namespace.named("default").fingerprint, key.text)
        with open_store(self._url) as store:
            while (record := store.locate(address[0], [key.text])[0]) is None:
                time.sleep(0.002)
            (location,) = record.locations
            endpoint = store.node_infos([location.node])[location.node].endpoint
        located = Located(record, ((location, endpoint),))

        def fetch() -> float:
            held: list[Pin] = []
            taken = seconds(
                functools.partial(transfer, self._loop, self._fetcher, address, located, held)
            )
            self._arena.release([held[0].ticket], FETCH_OWNER)
            self._arena.remove(held[0].item, "measured")
            return taken

        return fetch

    def close(self) -> None:
        self._fetcher.close()
        self._client.close()
        self._loop.close()
        self._arena.close()


def measured(ways: Mapping[str, Callable[[], float]], nbytes: int, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            if number:  # the first one connects
                taken[name].append(value)
    report: dict[str, Any] = {"nbytes": nbytes}
    for name, values in taken.items():
        median = statistics.median(values)
        report[f"{name}_ms"] = round(median * 1e3, 2)
        report[f"{name}_gb_per_s"] = round(nbytes / median / 1e9, 3)
    for ours, theirs in RATIOS:
        pairs = zip(taken[ours], taken[theirs], strict=True)
        ratio = statistics.median(other / own for own, other in pairs)
        report[f"{ours}_speed_over_{theirs}"] = round(ratio, 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-")))
        files = certified(directory, "by-tls", "reader", "bare")
        server = stack.enter_context(EmbeddedServer.start(directory / "kv", timeout_seconds=10.0))
        stack.callback(wait_until_gone, directory)
        plain, by_tls = (
            stack.enter_context(closing(Holder(directory, server.url, node, given)))
            for node, given in (("plain", None), ("by-tls", files))
        )
        bare_plain = stack.enter_context(bare(None))
        bare_tls = stack.enter_context(bare(files["bare"]))
        report = []
        for nbytes in SIZES_BYTES:
            target = memoryview(bytearray(b"\1" * nbytes))
            ways: dict[str, Callable[[], float]] = {
                "bare": functools.partial(received, bare_plain, target),
                "plain": plain.insert(nbytes),
                "bare_tls": functools.partial(received, bare_tls, target),
                "tls": by_tls.insert(nbytes),
            }
            report.append(measured(ways, nbytes, rounds))
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
