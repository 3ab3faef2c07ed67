"""Take the pictures of docs/tour.md: three nodes under load, and their dashboard in Chromium.

    make tour

The load is a few thousand lookups on three nodes of this host, some keys far more often than
others. A claim is held, and one node is killed for the last picture.
"""

import argparse
import hashlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from lookup_buffer import MissingTensor, TensorKey  # noqa: E402
from lookup_buffer.errors import BufferFull, NodeUnavailable  # noqa: E402
from nodes import MIB, NodeProcess, Nodes  # noqa: E402
from observing import Browser, Tab, chromium_executable  # noqa: E402
from servers import free_port  # noqa: E402
from store import EmbeddedServer  # noqa: E402

LAPTOP = (1280, 900)
PHONE = (390, 844)


def key_of(number: int) -> TensorKey:
    return TensorKey(hashlib.sha256(f"image-{number}".encode()).hexdigest())


def work(node: NodeProcess, seed: int, over: threading.Event) -> None:
    """Look items up, some far more often than others, and insert those that are absent."""
    dice, waves = random.Random(seed), seed
    try:
        with node.client() as client:
            while not over.wait(0.02):
                waves += 1
                number = int(dice.expovariate(1 / 40)) + 40 * (waves // 700)
                try:
                    client.select(key_of(number))
                except MissingTensor:
                    size = dice.choice([MIB // 8, MIB // 2, MIB])
                    try:
                        client.insert(key_of(number), torch.zeros(size, dtype=torch.uint8))
                    except BufferFull:
                        pass
    except NodeUnavailable:
        pass  # the node was killed, for the last picture


@contextmanager
def busy(nodes: list[NodeProcess]) -> Iterator[None]:
    over = threading.Event()
    threads = [
        threading.Thread(target=work, args=(node, seed, over)) for seed, node in enumerate(nodes)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def take_pictures(tab: Tab, dying: NodeProcess, folder: Path) -> None:
    def picture(
        name: str, size: tuple[int, int], *, dark: bool = False, whole: bool = True
    ) -> None:
        tab.look(*size, dark=dark)
        time.sleep(1.5)
        tab.picture(folder / f"{name}.png", whole=whole)
        print(f"{folder / name}.png")

    picture("laptop-light", LAPTOP)
    picture("laptop-dark", LAPTOP, dark=True, whole=False)
    picture("phone", PHONE, whole=False)
    tab.look(*LAPTOP)
    tab.type("#key", key_of(3).text[:12])
    tab.wait_for("document.querySelector('.findings')")
    picture("why", (1280, 420), whole=False)
    dying.kill()
    tab.wait_for("document.querySelector('[data-state=dead]')", 30.0)
    tab.run("document.querySelector('#answer button.plain').click()")
    picture("dead", LAPTOP, whole=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "tour")
    parser.add_argument("--seconds", type=float, default=100.0, help="of load before")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-")))
        server = stack.enter_context(EmbeddedServer.start(directory, timeout_seconds=10.0))
        nodes = Nodes(server.url)
        stack.callback(nodes.end)
        listen = f"http://127.0.0.1:{free_port()}"
        fleet = [
            nodes(node_id="gpu-host-1", capacity_bytes=96 * MIB, http_listen=listen),
            nodes(node_id="gpu-host-2", capacity_bytes=64 * MIB),
            nodes(node_id="gpu-host-3", capacity_bytes=48 * MIB),
        ]
        browser = Browser(chromium_executable())
        stack.callback(browser.close)
        tab = browser.open(f"{listen}/")
        with fleet[0].client() as engine, busy(fleet):
            engine.claim(TensorKey("an-image-that-is-being-encoded"), lease_seconds=600.0)
            time.sleep(arguments.seconds)
            take_pictures(tab, fleet[2], arguments.folder)


if __name__ == "__main__":
    main()
