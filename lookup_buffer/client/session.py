"""The attachment: a client's session with its node, kept up.

It finds or starts the node, keeps a pool of channels, and listens on the session's first connection
(the anchor) for what the node pushes. When the node is lost it says so, and a thread of its own
attaches again. What the node shares with it is mapped by `node_memory`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.channel import Channel, next_request_id
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import Closed, LookupBufferError, NodeRefused, NodeUnavailable
from lookup_buffer.node_memory import NodeMemories, NodeMemory
from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Join
from lookup_buffer.request import Request
from lookup_buffer.runtime import node_socket
from lookup_buffer.times import CALL_SECONDS

ATTACH_SECONDS = 10.0
CHANNELS_MAX = 16
RETRY_SECONDS_MIN = 0.1
RETRY_SECONDS_MAX = 2.0
TICK_SECONDS = 0.1
"""How often `on_tick` is called, at the least."""


@dataclass(slots=True, eq=False)
class _Live:
    """One session with one boot of a node."""

    session: int
    node: str
    boot: str
    anchor: Channel
    idle: list[Channel] = field(default_factory=list)


class Attachment:
    """Thread-safe, but never to be used in a forked child.

    `on_event(message)`, `on_lost()` and `on_tick()` are called on the listening thread, `on_tick()`
    once more by `close`. None of them may raise.
    """

    def __init__(
        self,
        config: BufferConfig,
        seat: list[Any] | None,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_attached: Callable[[], None],
        on_lost: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._config = config
        self._seat = seat
        self._on_event = on_event
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._on_tick = on_tick
        self.namespace = ""
        """The fingerprint under which this client's keys lie; empty until it has one."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CHANNELS_MAX)
        self._live: _Live | None = None
        self._memories = NodeMemories()
        self._closing = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="lb-client", daemon=True)

    def open(self, *, required: bool) -> None:
        """Attach and begin to listen.

        Raises:
            NodeRefused: the node that runs has another configuration.
            NodeUnavailable: there is none; not raised where it is not `required`.
        """
        try:
            self._attach()
        except NodeUnavailable:
            if required:
                raise
        self._listener.start()

    @property
    def attached(self) -> bool:
        return self._live is not None

    def call(self, request: Request, timeout: float) -> dict[str, Any]:
        """One round trip; see `Channel.call`. `timeout` bounds all of it."""
        deadline = time.monotonic() + timeout
        with self.channel(timeout) as channel:
            return channel.call(request, deadline - time.monotonic())

    @contextmanager
    def channel(self, timeout: float = CALL_SECONDS) -> Iterator[Channel]:
        """A channel for one caller, back in the pool afterwards if it is still sound."""
        live = self._current()
        deadline = time.monotonic() + min(timeout, CALL_SECONDS)
        if not self._slots.acquire(timeout=timeout):
            raise NodeUnavailable(f"all {CHANNELS_MAX} connections to the node are in use")
        try:
            channel = self._take(live, deadline)
            try:
                yield channel
            finally:
                self._give_back(live, channel)
        finally:
            self._slots.release()

    def post(self, request: Request) -> None:
        """Send a one-way request, without waiting for anything but room in the socket.

        Raises:
            NodeUnavailable: there is no node now.
        """
        live = self._current()
        with self._send_lock:
            live.anchor.send_now(request)

    def mention(self, request: Request) -> bool:
        """As `post`, but only where there is room (for a few 10 KB) now; whether it was sent."""
        live = self._current()
        with self._send_lock:
            if not live.anchor.has_room():
                return False
            live.anchor.send_now(request)
        return True

    def memory(self, boot: str | None = None) -> AbstractContextManager[NodeMemory]:
        """The memory of `boot` (None: the node's now), kept mapped meanwhile.

        Raises:
            NodeUnavailable: it is not mapped here.
            Closed: see `close`.
        """
        self._check_usable()
        return self._memories.use(self.boot if boot is None else boot)

    @property
    def boot(self) -> str:
        """The boot id of the node attached to, "" when there is none."""
        live = self._live
        return live.boot if live else ""

    def close(self) -> None:
        """Idempotent and bounded; the node releases at once what the session held."""
        if self._closing.is_set():
            return
        if self._pid != os.getpid():
            self._closing.set()  # and no more: the connections are the parent's
            return
        self._on_tick()
        self._closing.set()
        live = self._live
        if live is not None:
            try:
                with self._send_lock:  # not `post`, which is closed by now
                    live.anchor.send_now(Goodbye(next_request_id()))
            except LookupBufferError:
                pass  # it is gone, and our session with it
            live.anchor.close()
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join(timeout=2.0)
        self._lose(live)
        self._memories.close()

    # -- attach and listen

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this buffer was opened before a fork; open one in the child")
        if self._closing.is_set():
            raise Closed("the buffer is closed")

    def _current(self) -> _Live:
        self._check_usable()
        live = self._live
        if live is None:
            raise NodeUnavailable("not attached to a node; attaching again in the background")
        return live

    def _attach(self) -> None:
        deadline = time.monotonic() + ATTACH_SECONDS
        path = node_socket(self._config, timeout=ATTACH_SECONDS)
        anchor = Channel(path, timeout=CALL_SECONDS)
        try:
            hello = Hello(next_request_id(), VERSION, self._seat, self._config.expectations())
            anchor.send(hello, deadline=deadline)
            welcome, descriptors = anchor.receive_with_descriptors(deadline)
            try:
                memory = NodeMemory.adopt(descriptors, welcome["arena_bytes"])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except (OSError, ValueError, KeyError) as error:
            anchor.close()
            raise NodeUnavailable(f"the node at {path} cannot be attached to: {error}") from error
        except BaseException:
            anchor.close()
            raise
        boot = welcome["boot"]
        self._memories.add(boot, memory)
        with self._lock:
            self._live = _Live(welcome["session"], welcome["node"], boot, anchor)
        if self._seat is None:
            memory.arena.populate_in_background()  # not in engines: docs/decisions.md
        self._on_attached()

    def _listen(self) -> None:
        retry_seconds = RETRY_SECONDS_MIN
        while not self._closing.is_set():
            live = self._live
            try:
                if live is None:
                    self._attach()
                    retry_seconds = RETRY_SECONDS_MIN
                else:
                    self._pump(live)
            except NodeRefused:
                self._closing.wait(RETRY_SECONDS_MAX)  # an operator may end the other node
            except LookupBufferError:
                self._lose(live)
                self._closing.wait(retry_seconds)
                retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)
            self._memories.retire_lost()
        self._lose(self._live)  # attached while it was being closed

    def _pump(self, live: _Live) -> None:
        """Pass on what the node pushes, until the session ends."""
        while not self._closing.is_set():
            if live.anchor.readable_within(TICK_SECONDS):
                for message in live.anchor.receive(None):
                    if "event" in message:
                        self._on_event(message)
            self._on_tick()

    def _lose(self, live: _Live | None) -> None:
        with self._lock:
            if live is None or self._live is not live:
                return
            self._live = None
            idle, live.idle = live.idle, []
        self._memories.lose(live.boot)
        live.anchor.close()
        for channel in idle:
            channel.close()
        self._on_lost()

    # -- channels

    def _take(self, live: _Live, deadline: float) -> Channel:
        with self._lock:
            if live.idle:
                return live.idle.pop()
        channel = Channel(
            self._config.socket_path(), timeout=max(deadline - time.monotonic(), 1e-3)
        )
        try:
            channel.call(Join(next_request_id(), live.session), deadline - time.monotonic())
        except LookupBufferError as error:
            channel.close()
            raise NodeUnavailable(f"the session with the node has ended: {error}") from error
        return channel

    def _give_back(self, live: _Live, channel: Channel) -> None:
        with self._lock:
            if channel.open and self._live is live and not self._closing.is_set():
                live.idle.append(channel)
                return
        channel.close()
