"""A client's inserts, one value or many: bytes go through staging areas, in few requests.

While the node copies one staging area into its arena, the next one is filled: each has a connection
of its own. Any thread may call.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookup_buffer import codec
from lookup_buffer.client.session import (
    ClientSession,
    NodeConnection,
    error_of,
    next_request_id,
)
from lookup_buffer.codec import Value
from lookup_buffer.errors import LookupBufferError, NodeUnavailable, TensorTooLarge
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.fields import KEYS_BYTES_MAX, KEYS_MAX, checked_seconds, clamped_seconds
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, InsertOutcome
from lookup_buffer.shm.memory import copy_bytes
from lookup_buffer.times import CALL_SECONDS

STAGED_BYTES = 8 << 20
"""Values of up to so many bytes share one staging area and one request."""
ARENA_SHARE = 16
"""Nor do they fill more than this part of the arena: what is being written cannot be evicted."""
STAGED_MAX = min(256, KEYS_MAX)
"""Bound on the values of one request, so that their keys fit it."""
ALIGNMENT = 64
"""Of each value in a staging area, in bytes."""


class Inserted(NamedTuple):
    outcome: InsertOutcome
    checksum: int | None
    """Of the stored bytes; None for EXISTS."""


@dataclass(slots=True)
class _Staged:
    """Values of one request, which are in the staging area of `connection`."""

    connection: NodeConnection
    request: Insert
    indexes: list[int]
    deadline: float


class Inserts:
    """Inserts with one time to live and one timeout, in seconds."""

    def __init__(self, session: ClientSession, ttl_seconds: float | None, timeout: float) -> None:
        """Raises ConfigError if `ttl_seconds` is not a valid time, or `timeout` not a number."""
        if ttl_seconds is not None:
            ttl_seconds = checked_seconds("ttl_seconds", ttl_seconds)
        self._session = session
        self._ttl_seconds = ttl_seconds
        self._timeout = clamped_seconds(timeout)

    def insert_one(self, key: TensorKey, value: Value) -> Inserted:
        """Raises what `LookupBuffer.insert` raises."""
        deadline = time.monotonic() + self._timeout
        with self._session.memory() as memory:
            header = _header_of(value, memory.arena.nbytes)
        with self._session.connection(self._bound([(key, value)])) as connection:
            staged = self._send(connection, [(key, value)], [header], [0], deadline)
            (result,) = connection.reply(staged.request, staged.deadline)["results"]
        inserted = _result_of(result)
        if isinstance(inserted, LookupBufferError):
            raise inserted
        return inserted

    def insert(
        self, items: Sequence[tuple[TensorKey, Value]]
    ) -> list[Inserted | LookupBufferError]:
        """The result for each item, in order; errors are values."""
        results: list[Inserted | LookupBufferError | None] = [None] * len(items)
        headers = [TensorHeader.of_none()] * len(items)
        try:
            with self._session.memory() as memory:
                capacity_bytes = memory.arena.nbytes
            for index, (_, value) in enumerate(items):
                try:
                    headers[index] = _header_of(value, capacity_bytes)
                except LookupBufferError as error:
                    results[index] = error
            fits = [index for index, result in enumerate(results) if result is None]
            most_bytes = min(STAGED_BYTES, capacity_bytes // ARENA_SHARE)
            groups = list(_groups(fits, items, headers, most_bytes))
            if groups:
                self._insert_groups(items, headers, groups, results)
        except LookupBufferError as error:
            return [error if result is None else result for result in results]
        return [result for result in results if result is not None]

    def _bound(self, items: Sequence[tuple[TensorKey, Value]]) -> float:
        """Until a connection is there, in seconds. The timeout of a hand-off is its wait for room,
        which may be 0."""
        waits = any(not key.is_shared for key, _ in items)
        return self._timeout + CALL_SECONDS if waits else self._timeout

    def _insert_groups(
        self,
        items: Sequence[tuple[TensorKey, Value]],
        headers: Sequence[TensorHeader],
        groups: Sequence[list[int]],
        results: list[Inserted | LookupBufferError | None],
    ) -> None:
        """Fill in the results of each group of items. Groups on two connections may be stored in
        any order, so values of one key take one."""
        sent: deque[_Staged] = deque()
        is_in_any_order = len({key for key, _ in items}) == len(items)
        at_once = len(groups) if is_in_any_order else 1
        with self._connections(at_once, self._bound(items)) as free:
            try:
                for group in groups:
                    if not free:
                        free.append(_receive(sent[0], results))
                        sent.popleft()
                    deadline = time.monotonic() + self._timeout
                    sent.append(self._send(free.pop(), items, headers, group, deadline))
                while sent:
                    _receive(sent[0], results)
                    sent.popleft()
            finally:
                for staged in sent:  # after an error: the reply may still come
                    staged.connection.close()

    @contextmanager
    def _connections(self, groups: int, seconds: float) -> Iterator[list[NodeConnection]]:
        """A connection, and a second one if it is of use and free."""
        with ExitStack() as used:
            free = [used.enter_context(self._session.connection(seconds))]
            if groups > 1:
                with suppress(NodeUnavailable):
                    second = self._session.connection(seconds, wait=False)
                    free.append(used.enter_context(second))
            yield free

    def _send(
        self,
        connection: NodeConnection,
        items: Sequence[tuple[TensorKey, Value]],
        headers: Sequence[TensorHeader],
        group: list[int],
        deadline: float,
    ) -> _Staged:
        """Copy a group into the staging area and request its insert."""
        waits = any(not items[index][0].is_shared for index in group)
        bound = deadline + CALL_SECONDS if waits else deadline
        offsets, end = [], 0
        for index in group:
            offsets.append(end)
            end = _aligned(end + headers[index].nbytes)
        if end:
            staging = connection.stage(end, bound - time.monotonic())
            for index, offset in zip(group, offsets, strict=True):
                value = items[index][1]
                if value is not None and headers[index].nbytes:
                    owner, address, nbytes = codec.contiguous_bytes(value)
                    copy_bytes(staging.address + offset, address, nbytes)
                    del owner  # kept the memory at `address` alive until here
        left = deadline - time.monotonic()
        request = Insert(
            next_request_id(),
            self._session.namespace,
            [items[index][0].text for index in group],
            [headers[index].to_fields() for index in group],
            offsets,
            self._ttl_seconds,
            clamped_seconds(left) if waits else 0.0,
        )
        if waits:
            deadline = time.monotonic() + clamped_seconds(left) + CALL_SECONDS
        connection.send(request, deadline=deadline)
        return _Staged(connection, request, group, deadline)


def _header_of(value: Value, capacity_bytes: int) -> TensorHeader:
    header = codec.header_of(value)
    if header.nbytes > capacity_bytes:
        raise TensorTooLarge(
            f"a tensor of {header.nbytes} bytes exceeds the arena of {capacity_bytes} bytes; "
            "raise capacity_bytes"
        )
    return header


def _groups(
    indexes: Sequence[int],
    items: Sequence[tuple[TensorKey, Value]],
    headers: Sequence[TensorHeader],
    most_bytes: int,
) -> Iterator[list[int]]:
    """The items of each request."""
    group: list[int] = []
    nbytes = characters = 0
    for index in indexes:
        size, length = _aligned(headers[index].nbytes), len(items[index][0].text)
        nbytes, characters = nbytes + size, characters + length
        is_full = nbytes > most_bytes or characters > KEYS_BYTES_MAX or len(group) == STAGED_MAX
        if group and is_full:
            yield group
            group, nbytes, characters = [], size, length
        group.append(index)
    if group:
        yield group


def _receive(staged: _Staged, results: list[Inserted | LookupBufferError | None]) -> NodeConnection:
    """Fill in the results of a request; returns its connection."""
    reply = staged.connection.reply(staged.request, staged.deadline)
    for index, result in zip(staged.indexes, reply["results"], strict=True):
        results[index] = _result_of(result)
    return staged.connection


def _result_of(result: dict[str, Any]) -> Inserted | LookupBufferError:
    if "error" in result:
        return error_of(result)
    return Inserted(InsertOutcome(result["outcome"]), result.get("checksum"))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
