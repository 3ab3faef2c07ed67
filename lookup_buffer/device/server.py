"""PoolServer: sends tensors of this process's pool to other processes on request.

One thread serves each pair; the number of pairs is bounded. At the limit, the pair whose last
request is oldest is closed. A request that names the pool and the mark of its entry gets the entry,
or else the reply *stale*. The pair with a reader that dies or hangs is closed, and so is a pair for
which the device fails.

The server does not change the content of the pool: it only pins entries while it sends them.
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
from lookup_buffer.device.protocol import ProtocolVersion, make_upgrade, pipe_memory
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
from lookup_buffer.protocol.auth import accept_handshake, is_everywhere, only_lanes

INCOMING_PAIRS_MAX: Final = 32
DISCOVERED_PAIRS_MAX: Final = 16
"""From so many pairs on, a connection that was made on discovery, before any read needs it, is
refused."""
UNADMITTED_MAX: Final = 32
"""Connections that have not sent a request yet; each has `HANDSHAKE_SECONDS`."""
IDLE_SECONDS: Final = 300.0
"""A pair without a request for so long is closed; its reader makes a new one when it needs it."""
SEND_SECONDS: Final = 10.0


class PoolServer:
    """Thread-safe.

    Args:
        pool_id: the name of this process's pool in the records.
        host: address to listen at.
        token: the fleet's secret, or None.
        limits: of the pipes of all pairs.
        stats: receives the failures of the device.

    Raises:
        ConfigError: this process cannot listen at `host`, or that is no single address.
        PipeBroken: the system grants no thread to listen.
    """

    def __init__(
        self,
        pool: DevicePool,
        memory: PoolMemory,
        version: ProtocolVersion,
        pool_id: str,
        *,
        host: str,
        token: str | None,
        limits: PipeLimits,
        stats: LaneStats,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._pool_id = pool_id
        self._token = token
        self._limits = replace(limits, message_bytes=protocol.REQUEST_BYTES_MAX)
        self._stats = stats
        self._upgrade = make_upgrade(version, memory)(True, limits.silence_seconds)
        self._version = version
        self._lock = threading.Lock()
        self._pipes: OrderedDict[KVPipe, None] = OrderedDict()
        """In the order of their last request; the most recent is last."""
        self._closed = False
        try:
            self._listener, shown = listening_socket(host, 0)
        except OSError as error:
            raise ConfigError(f"a pool cannot listen at {host}: {error.strerror}") from error
        if is_everywhere(self._listener):
            self._listener.close()
            raise ConfigError(
                f"a pool cannot listen at {host!r}: it needs one address of this host, at which "
                "others reach it (the setting 'device_lane_host')"
            )
        self.port = int(shown.rpartition(":")[2])
        self.served = 0
        """Number of tensors sent."""
        acceptor = Acceptor(INCOMING_PAIRS_MAX + UNADMITTED_MAX, "lb-lane-peer")
        acceptor.start(self._listener, self._handshake, "lb-lane-accept")

    def pairs(self) -> int:
        with self._lock:
            return len(self._pipes)

    def close(self) -> None:
        """Idempotent; never waits."""
        with self._lock:
            self._closed = True
            pipes = list(self._pipes)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        for pipe in pipes:
            pipe.abort()

    def _handshake(self, stream: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        pipe = StreamPipe("lane", self._limits, pipe_memory(self._version, self._memory))
        is_ended_in_order = False
        try:
            link = accept_handshake(
                stream,
                token=self._token,
                timeout=HANDSHAKE_SECONDS,
                accepts=only_lanes(stream),
            )
            try:
                frames = self._upgrade(link, deadline)
            except BaseException:
                link.close()
                raise
            pipe.add_remote_end(frames)
            self._serve(pipe)
        except Closed:
            is_ended_in_order = True
        except LookupBufferError:
            pass  # the connection was not a valid reader's, or it broke
        except Exception as error:  # noqa: BLE001 -- top of a thread; a device that failed
            self._stats.warn_of_serving(error)
        with self._lock:
            is_admitted = pipe in self._pipes
            self._pipes.pop(pipe, None)
        if is_admitted or not is_ended_in_order:  # else the thread that evicted this pipe closes it
            pipe.abort()

    def _admit(self, pipe: KVPipe, request: dict[str, object]) -> bool:
        """Admit the pipe of this request as a pair; returns whether it is.

        At the limit it replaces the pair whose last request is oldest.
        """
        surplus = None
        with self._lock:
            is_crowded = pipe not in self._pipes and len(self._pipes) >= DISCOVERED_PAIRS_MAX
            if self._closed or (is_crowded and request.get("on_discovery")):
                return False
            self._pipes[pipe] = None
            self._pipes.move_to_end(pipe)
            if len(self._pipes) > INCOMING_PAIRS_MAX:
                surplus, _ = self._pipes.popitem(last=False)
        if surplus is not None:
            surplus.close()  # in order: its reader makes a new pair when it needs one
        return True

    def _serve(self, pipe: KVPipe) -> None:
        with self._memory.working():
            seconds = HANDSHAKE_SECONDS  # until its first request
            while not self._closed:
                try:
                    request = protocol.fields_in(pipe.recv_tensor(timeout=seconds))
                except LookupTimeout:
                    break
                if not self._admit(pipe, request):
                    break
                self._reply(pipe, request)
                seconds = IDLE_SECONDS
            pipe.close()

    def _reply(self, pipe: KVPipe, request: dict[str, object]) -> None:
        match request:
            case {"ask": int(number), "mark": 0}:
                probe = torch.zeros(
                    protocol.PROBE_BYTES, dtype=torch.uint8, device=self._memory.device
                )
                pipe.send_tensor(probe, protocol.payload_key(number), timeout=SEND_SECONDS)
            case {
                "ask": int(number),
                "pool": str(pool_id),
                "namespace": str(namespace),
                "key": str(key),
                "mark": int(mark),
            }:
                # This process may have the port of a pool that no longer exists.
                mine = pool_id == self._pool_id
                entry = self._pool.pin((namespace, key), mark=mark) if mine else None
                self._send(pipe, number, entry)
            case _:
                raise ProtocolError("not a request to a pool")

    def _send(self, pipe: KVPipe, number: int, entry: Entry | None) -> None:
        key = protocol.reply_key(number)
        if entry is None:
            pipe.send_tensor(protocol.message({"status": "stale"}), key, timeout=SEND_SECONDS)
            return
        try:
            tensor, ready = entry.value
            self._memory.wait(ready)
            pipe.send_tensor(protocol.message({"status": "ok"}), key, timeout=SEND_SECONDS)
            pipe.send_tensor(tensor, protocol.payload_key(number), timeout=SEND_SECONDS)
            self.served += 1
        finally:
            self._pool.unpin(entry)
