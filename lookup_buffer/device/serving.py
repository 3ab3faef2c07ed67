"""Serving: other processes take from this one's pool what they ask for.

One thread a pair, a bounded number of pairs. What is asked for is held while it is sent, and is
what the reader knows of, by its mark, or else *stale*. A reader that dies or hangs costs its pair.
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from lookup_buffer.device import asking
from lookup_buffer.device.dialect import Dialect, joining, memory_of
from lookup_buffer.device.place import Place
from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.errors import LookupBufferError, LookupTimeout, ProtocolError
from lookup_buffer.greeting import HANDSHAKE_SECONDS, Greetings, listening
from lookup_buffer.handshake import accept_handshake
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.stream import StreamPipe

PEERS_MAX: Final = 32
IDLE_SECONDS: Final = 300.0
"""A pair that nobody asked anything for so long is ended; its reader makes another when it asks."""
SEND_SECONDS: Final = 10.0


class Serving:
    """Thread-safe.

    Args:
        pool_id: what this process's pool is called in the records.
        limits: of the pipes of all pairs.
    """

    def __init__(
        self,
        pool: DevicePool,
        place: Place,
        dialect: Dialect,
        pool_id: str,
        *,
        host: str,
        token: str | None,
        limits: PipeLimits,
    ) -> None:
        self._pool = pool
        self._place = place
        self._pool_id = pool_id
        self._token = token
        self._limits = replace(limits, message_bytes=asking.QUESTION_BYTES_MAX)
        self._join = joining(dialect, place)(True, limits.silence_seconds)
        self._dialect = dialect
        self._lock = threading.Lock()
        self._pipes: set[KVPipe] = set()
        self._closed = False
        self._listener, shown = listening(host, 0)
        self.port = int(shown.rpartition(":")[2])
        self.served = 0
        """How many tensors were sent."""
        self._accepting = threading.Thread(
            target=Greetings(PEERS_MAX, "lb-lane-peer").serve,
            args=(self._listener, self._greet),
            name="lb-lane-accept",
            daemon=True,
        )
        self._accepting.start()

    def pairs(self) -> int:
        with self._lock:
            return len(self._pipes)

    def close(self) -> None:
        """Idempotent; never waits."""
        with self._lock:
            self._closed = True
            pipes = list(self._pipes)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for pipe in pipes:
            pipe.abort()

    def _greet(self, stream: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        pipe = StreamPipe("lane", self._limits, memory_of(self._dialect, self._place))
        with suppress(LookupBufferError):  # whoever that was, he is no peer, or is gone
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            try:
                frames = self._join(link, deadline)
            except BaseException:
                link.close()
                raise
            pipe.meet(frames)
            with self._lock:
                if not self._closed:
                    self._pipes.add(pipe)
            try:
                self._serve(pipe)
            finally:
                with self._lock:
                    self._pipes.discard(pipe)
                pipe.abort()

    def _serve(self, pipe: KVPipe) -> None:
        with self._place.working():
            while not self._closed:
                try:
                    question = pipe.recv_tensor(timeout=IDLE_SECONDS)
                except LookupTimeout:
                    pipe.close()
                    return
                self._answer(pipe, asking.fields_in(question))

    def _answer(self, pipe: KVPipe, question: dict[str, object]) -> None:
        match question:
            case {"ask": int(ask), "mark": 0}:
                probe = torch.zeros(
                    asking.PROBE_BYTES, dtype=torch.uint8, device=self._place.device
                )
                pipe.send_tensor(probe, asking.payload_key(ask), timeout=SEND_SECONDS)
            case {
                "ask": int(ask),
                "pool": str(pool_id),
                "namespace": str(namespace),
                "key": str(key),
                "mark": int(mark),
            }:
                # A pool that has gone may have left its port to this one.
                mine = pool_id == self._pool_id
                entry = self._pool.hold((namespace, key), mark=mark) if mine else None
                self._send(pipe, ask, entry)
            case _:
                raise ProtocolError("that is no question to a pool")

    def _send(self, pipe: KVPipe, ask: int, entry: Entry | None) -> None:
        where = asking.verdict_key(ask)
        if entry is None:
            pipe.send_tensor(asking.message({"status": "stale"}), where, timeout=SEND_SECONDS)
            return
        try:
            tensor, ready = entry.value
            self._place.wait(ready)
            pipe.send_tensor(asking.message({"status": "ok"}), where, timeout=SEND_SECONDS)
            pipe.send_tensor(tensor, asking.payload_key(ask), timeout=SEND_SECONDS)
            self.served += 1
        finally:
            self._pool.let_go(entry)
