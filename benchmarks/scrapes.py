"""The cost of scraping a node: the same work with and without scrapes, in turns.

The work is round trips that the node's loop answers: an insert of 256 bytes, and a `view` of it.
Each window of some seconds gives round trips a second, and the node's processor time for each. The
result has medians of the ratios of windows, with scrapes over without. The node is scraped twenty
times a second, since the cost of one scrape a second is lost in the noise; one a second costs a
twentieth (`each_second`). On a machine with other load, use the processor time. `scrape_seconds` is
the node's processor time for one page.

    python -m benchmarks.scrapes [--rounds 20] [--window 2]
"""

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lookup_buffer import BufferConfig, LookupBuffer, TensorKey
from store import EmbeddedServer

SCRAPES_A_SECOND = 20
PAGES = 200


@dataclass(frozen=True)
class Window:
    rate: float
    """Round trips a second."""
    seconds: float
    """Processor time of the node for a round trip."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def node_pid(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


def processor_seconds(pid: int) -> float:
    """Processor time of all threads; those of a node do not end."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def scrape(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10.0) as page:
        page.read()


def scrape_until(url: str, stop: threading.Event) -> None:
    while not stop.wait(1 / SCRAPES_A_SECOND):
        scrape(url)


def work(buffer: LookupBuffer, pid: int, seconds: float) -> Window:
    value, count = torch.zeros(256, dtype=torch.uint8), 0
    busy, started = processor_seconds(pid), time.perf_counter()
    while time.perf_counter() - started < seconds:
        key = TensorKey(f"scrapes-{time.monotonic_ns()}")
        buffer.insert(key, value)
        with buffer.view(key):
            count += 1
    elapsed = time.perf_counter() - started
    return Window(count / elapsed, (processor_seconds(pid) - busy) / count)


def scraped(buffer: LookupBuffer, pid: int, seconds: float, url: str) -> Window:
    stop = threading.Event()
    scraper = threading.Thread(target=scrape_until, args=(url, stop))
    scraper.start()
    try:
        return work(buffer, pid, seconds)
    finally:
        stop.set()
        scraper.join()


def page_seconds(pid: int, url: str) -> float:
    busy = processor_seconds(pid)
    for _ in range(PAGES):
        scrape(url)
    return (processor_seconds(pid) - busy) / PAGES


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lb-") as name:
        directory = Path(name)
        with EmbeddedServer.start(directory / "valkey", timeout_seconds=10.0) as server:
            config = BufferConfig(
                directory=directory / "node",
                capacity_bytes=256 << 20,
                store_url=server.url,
                idle_exit_seconds=2.0,
                http_listen=f"http://127.0.0.1:{free_port()}",
            )
            url = f"{config.http_listen}/metrics"
            with LookupBuffer(config) as buffer:
                pid = node_pid(config.socket_path())
                scrape(url)
                work(buffer, pid, 2.0)  # until the arena is faulted in
                pairs = []
                for number in range(rounds):
                    if number % 2:
                        apart = work(buffer, pid, seconds)
                        pairs.append((scraped(buffer, pid, seconds, url), apart))
                    else:
                        with_it = scraped(buffer, pid, seconds, url)
                        pairs.append((with_it, work(buffer, pid, seconds)))
                page = page_seconds(pid, url)
            while config.socket_path().exists():
                time.sleep(0.1)
    processor = statistics.median(one.seconds / apart.seconds for one, apart in pairs)
    return {
        "rounds": rounds,
        "round_trips_a_second": statistics.median(apart.rate for _, apart in pairs),
        "rate_ratio": statistics.median(one.rate / apart.rate for one, apart in pairs),
        "processor_ratio": processor,
        "each_second": (processor - 1) / SCRAPES_A_SECOND,
        "scrape_seconds": page,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--window", type=float, default=2.0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rounds, arguments.window), indent=2))


if __name__ == "__main__":
    main()
