"""`Receiver`: requests tensors on a connection to another node, and receives what comes.

The loop reads headers. A thread (`lb-fetch`) receives bytes that are many or not here yet. Called
by `transfer`, which decides what is requested where.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from lookup_buffer.errors import LookupBufferError, MissReason, PipeTimeout
from lookup_buffer.node.links import ThreadPool
from lookup_buffer.protocol.framing import Frame
from lookup_buffer.protocol.stream import FramedSocket, Hasher
from lookup_buffer.times import PEER_ANSWER_SECONDS, PEER_PROGRESS_SECONDS

THREADS: Final = 128
"""Each receives from one holder at a time, so slow ones delay only what they are asked for."""
AT_ONCE_BYTES: Final = 256 << 10
"""Up to so many bytes that have arrived are received on the loop: 50 µs, as long as a thread needs
to begin."""


class Busy(LookupBufferError):
    """The transfer did not get its turn in time: the other side has not failed."""


class Missed(LookupBufferError):
    """An item does not come, for this reason; the others of its batch may."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Receiver:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._threads = ThreadPool(THREADS, "lb-fetch")

    def tick(self) -> None:
        """End threads that are not used. To be called now and then."""
        self._threads.tick()

    def close(self) -> None:
        self._threads.close()

    async def request(self, link: FramedSocket, items: Sequence[Sequence[object]]) -> None:
        """Send one request, for `items` as `peers` reads them."""
        request = {"op": "get", "items": items}
        sent = link.send_nowait(request)
        if sent is not None:
            send = partial(link.send, request, timeout=PEER_ANSWER_SECONDS, already_sent=sent)
            await self._on_thread(send, link.abort)

    async def header(self, link: FramedSocket, *, has_begun: bool = False) -> Frame:
        """The next answer's header; its payload is received next. `has_begun`: others of the same
        transfer have come, so its bound is that of a transfer without progress."""
        bound = PEER_PROGRESS_SECONDS if has_begun else PEER_ANSWER_SECONDS
        deadline = self.loop.time() + bound
        while link.peek() is None:
            await self._readable(link, deadline)
            if link.peek() is None:
                link.check_peeked()
        return link.recv_header(timeout=0.0)

    async def payload(self, link: FramedSocket, memory: memoryview) -> int:
        """Receive into `memory`; returns the checksum."""
        hasher = xxh3_64()
        await self._receive(link, memory, hasher)
        return hasher.intdigest()

    async def part(self, link: FramedSocket, memory: memoryview) -> None:
        """As `payload`, for bytes whose checksum is computed when all others have come."""
        await self._receive(link, memory, None)

    async def checksum(self, memory: memoryview) -> int:
        """Of all of `memory`, computed on a thread."""
        found: list[int] = []
        await self._on_thread(lambda: found.append(xxh3_64_intdigest(memory)), lambda: None)
        return found[0]

    async def _receive(self, link: FramedSocket, memory: memoryview, hasher: Hasher | None) -> None:
        """Receive what has arrived, which lets the holder send on until a thread that receives the
        rest is awake."""
        rest = memory[link.recv_available(memory[:AT_ONCE_BYTES], hasher) :]
        if rest:
            receive = partial(link.recv_into, rest, timeout=PEER_PROGRESS_SECONDS, hasher=hasher)
            await self._on_thread(receive, link.abort)

    async def _readable(self, link: FramedSocket, deadline: float) -> None:
        readable: asyncio.Future[None] = self.loop.create_future()
        descriptor = link.descriptor
        self.loop.add_reader(descriptor, _set, readable)
        try:
            async with asyncio.timeout_at(deadline):
                await readable
        except TimeoutError as error:
            raise PipeTimeout("the holder did not answer in time") from error
        finally:
            self.loop.remove_reader(descriptor)

    async def _on_thread(self, move: Callable[[], None], abort: Callable[[], object]) -> None:
        """Run `move`, which `abort` ends early. Also if cancelled, it has ended then.

        Raises:
            PipeError: as `move`.
            Busy: no thread was free in time, or could be started.
        """
        try:
            job = self._threads.submit(move)
        except RuntimeError as error:  # without memory, or at the end of the node
            raise Busy(f"no thread to receive: {error}") from error
        moved = asyncio.wrap_future(job, loop=self.loop)
        bound = self.loop.call_later(PEER_PROGRESS_SECONDS, job.cancel)  # unless it has begun
        try:
            await asyncio.shield(moved)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if moved.cancelled() and task is not None and not task.cancelling():
                raise Busy("no thread was free in time") from None
            abort()
            await asyncio.wait([moved])
            moved.exception()  # the expected one; else asyncio would report it as a bug
            raise
        finally:
            bound.cancel()


def _set(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)
