"""Serving: other processes take from this one's pool what they ask for.

One thread a pair, a bounded number of pairs: the one that was not asked for longest makes place for
another. What is asked for is what the reader knows of, by its mark, or else *stale*. A reader that
dies or hangs costs its pair, and so does a device that fails.
"""

import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from lookup_buffer.device import protocol
from lookup_buffer.device.memory import Place
from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.device.protocol import Dialect, joining, memory_of
from lookup_buffer.device.stats import Notes
from lookup_buffer.errors import (
    Closed,
    ConfigError,
    LookupBufferError,
    LookupTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.auth import accept_handshake
from lookup_buffer.protocol.stream import HANDSHAKE_SECONDS, Greetings, listening

PEERS_MAX: Final = 32
AT_SIGHT_MAX: Final = 16
"""From so many on there is no place for those that want nothing as yet."""
STRANGERS_MAX: Final = 32
"""Who have connected and are no peers yet; each has `HANDSHAKE_SECONDS`."""
IDLE_SECONDS: Final = 300.0
"""A pair that nobody asked anything for so long is ended; its reader makes another when it asks."""
SEND_SECONDS: Final = 10.0


class Serving:
    """Thread-safe.

    Args:
        pool_id: what this process's pool is called in the records.
        limits: of the pipes of all pairs.
        notes: told of a device that fails.

    Raises:
        ConfigError: `host` is no address to listen at.
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
        notes: Notes,
    ) -> None:
        self._pool = pool
        self._place = place
        self._pool_id = pool_id
        self._token = token
        self._limits = replace(limits, message_bytes=protocol.QUESTION_BYTES_MAX)
        self._notes = notes
        self._join = joining(dialect, place)(True, limits.silence_seconds)
        self._dialect = dialect
        self._lock = threading.Lock()
        self._pipes: OrderedDict[KVPipe, None] = OrderedDict()
        """Whose peer asked last, last."""
        self._closed = False
        try:
            self._listener, shown = listening(host, 0)
        except OSError as error:
            raise ConfigError(f"a pool cannot listen at {host}: {error.strerror}") from error
        self.port = int(shown.rpartition(":")[2])
        self.served = 0
        """How many tensors were sent."""
        self._accepting = threading.Thread(
            target=Greetings(PEERS_MAX + STRANGERS_MAX, "lb-lane-peer").serve,
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
        is_ended_in_order = False
        try:
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            try:
                frames = self._join(link, deadline)
            except BaseException:
                link.close()
                raise
            pipe.meet(frames)
            self._serve(pipe)
        except Closed:
            is_ended_in_order = True
        except LookupBufferError:
            pass  # whoever that was, he is no peer, or is gone
        except Exception as error:  # noqa: BLE001 -- top of a thread; a device that failed
            self._notes.warn_of_serving(error)
        with self._lock:
            has_place = pipe in self._pipes
            self._pipes.pop(pipe, None)
        if has_place or not is_ended_in_order:  # else who took its place is about to end it
            pipe.abort()

    def _has_place(self, pipe: KVPipe, question: dict[str, object]) -> bool:
        """Whether who asks this is one of the peers, or becomes one, where necessary in place of
        one who has asked nothing for longer."""
        surplus = None
        with self._lock:
            is_crowded = pipe not in self._pipes and len(self._pipes) >= AT_SIGHT_MAX
            if self._closed or (is_crowded and question.get("at_sight")):
                return False
            self._pipes[pipe] = None
            self._pipes.move_to_end(pipe)
            if len(self._pipes) > PEERS_MAX:
                surplus, _ = self._pipes.popitem(last=False)
        if surplus is not None:
            surplus.close()  # in order: its reader makes another when it asks
        return True

    def _serve(self, pipe: KVPipe) -> None:
        with self._place.working():
            seconds = HANDSHAKE_SECONDS  # a stranger, until it asks
            while not self._closed:
                try:
                    question = protocol.fields_in(pipe.recv_tensor(timeout=seconds))
                except LookupTimeout:
                    break
                if not self._has_place(pipe, question):
                    break
                self._answer(pipe, question)
                seconds = IDLE_SECONDS
            pipe.close()

    def _answer(self, pipe: KVPipe, question: dict[str, object]) -> None:
        match question:
            case {"ask": int(ask), "mark": 0}:
                probe = torch.zeros(
                    protocol.PROBE_BYTES, dtype=torch.uint8, device=self._place.device
                )
                pipe.send_tensor(probe, protocol.payload_key(ask), timeout=SEND_SECONDS)
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
        where = protocol.verdict_key(ask)
        if entry is None:
            pipe.send_tensor(protocol.message({"status": "stale"}), where, timeout=SEND_SECONDS)
            return
        try:
            tensor, ready = entry.value
            self._place.wait(ready)
            pipe.send_tensor(protocol.message({"status": "ok"}), where, timeout=SEND_SECONDS)
            pipe.send_tensor(tensor, protocol.payload_key(ask), timeout=SEND_SECONDS)
            self.served += 1
        finally:
            self._pool.let_go(entry)
