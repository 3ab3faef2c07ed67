"""Serving: sends tensors of this process's pool to other processes on request.

One thread serves each pair; the number of pairs is bounded. At the limit, the pair whose last
request is oldest is closed. A request that names the pool and the mark of its entry gets the entry,
or else the verdict *stale*. A reader that dies or hangs loses its pair, and so does one for which
the device fails.

This module decides nothing about the content of the pool: it only pins entries while it sends them.
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
from lookup_buffer.device.memory import PoolMemory
from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.device.protocol import ProtocolVersion, joining, memory_of
from lookup_buffer.device.stats import LaneStats
from lookup_buffer.errors import (
    Closed,
    ConfigError,
    LookupBufferError,
    LookupTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS, Acceptor, listening_socket
from lookup_buffer.protocol.auth import accept_handshake

PEERS_MAX: Final = 32
AT_SIGHT_MAX: Final = 16
"""From so many pairs on, a connection that wants nothing yet (`at_sight`) is refused."""
STRANGERS_MAX: Final = 32
"""Connections that have not sent a request yet; each has `HANDSHAKE_SECONDS`."""
IDLE_SECONDS: Final = 300.0
"""A pair without a request for so long is closed; its reader makes another when it needs one."""
SEND_SECONDS: Final = 10.0


class PoolServer:
    """Thread-safe.

    Args:
        pool_id: the name of this process's pool in the records.
        host: address to listen at.
        token: the fleet's secret, or None.
        limits: of the pipes of all pairs.
        notes: receives the failures of the device.

    Raises:
        ConfigError: this process cannot listen at `host`.
    """

    def __init__(
        self,
        pool: DevicePool,
        place: PoolMemory,
        dialect: ProtocolVersion,
        pool_id: str,
        *,
        host: str,
        token: str | None,
        limits: PipeLimits,
        notes: LaneStats,
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
        """In the order of their last request; the most recent is last."""
        self._closed = False
        try:
            self._listener, shown = listening_socket(host, 0)
        except OSError as error:
            raise ConfigError(f"a pool cannot listen at {host}: {error.strerror}") from error
        self.port = int(shown.rpartition(":")[2])
        self.served = 0
        """Number of tensors sent."""
        self._accepting = threading.Thread(
            target=Acceptor(PEERS_MAX + STRANGERS_MAX, "lb-lane-peer").serve,
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
            pass  # the connection was not a valid peer, or it is gone
        except Exception as error:  # noqa: BLE001 -- top of a thread; a device that failed
            self._notes.warn_of_serving(error)
        with self._lock:
            has_place = pipe in self._pipes
            self._pipes.pop(pipe, None)
        if has_place or not is_ended_in_order:  # else the thread that evicted this pipe closes it
            pipe.abort()

    def _has_place(self, pipe: KVPipe, question: dict[str, object]) -> bool:
        """Whether the pipe of this question is admitted as a peer.

        At the limit it is admitted in place of the peer whose last request is oldest.
        """
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
            surplus.close()  # orderly: its reader makes another pair when it needs one
        return True

    def _serve(self, pipe: KVPipe) -> None:
        with self._place.working():
            seconds = HANDSHAKE_SECONDS  # until its first request
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
                # This process may have the port of a pool that is gone.
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
