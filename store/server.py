"""Server: calls of one Redis or Valkey server, each with a deadline, over a pool of connections."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import MaxConnectionsError
from redis.exceptions import TimeoutError as ConnectTimeoutError

from store.connections import Access, Endpoint
from store.errors import StoreError, StoreRefused, StoreUnavailable
from store.replies import (
    FAILURES,
    REFUSALS,
    Command,
    Reply,
    abort,
    code_of,
    pack,
    read_replies,
    reason_of,
)

HANGS_SHARE = 0.4
"""A server that did not answer within this part of a timeout is taken for one that hangs: a
sentinel, or a source of the slot map, has half of one."""
PROBE_SECONDS_MIN, PROBE_SECONDS_MAX = 0.05, 1.0
"""Pause between two probes of a server that hangs, doubled each time."""
PROBE_ANSWER_SECONDS = 5.0
"""How long a probe waits. Without an owner's loop it only advances while calls drive the loop, and
would not get its answer within the time of a call."""
PROBED_SECONDS = 30.0
"""For how long a server is probed that no call is for: it may have left the cluster."""

Incarnation = tuple[str, int]
"""Of a server: equal for as long as the same process answers, as far as is known."""


class Budget:
    """The time of one operation: the call timeout, plus the connect timeout once for all dials.

    Time for dialling does not reduce the time for the call.
    """

    def __init__(self, call_seconds: float, dial_seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._at = self._clock() + call_seconds
        self._dial_seconds = dial_seconds

    @classmethod
    def of(cls, access: Access) -> "Budget":
        return cls(access.call_timeout_seconds, access.connect_timeout_seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; never below 0."""
        return max(self._at - self._clock(), 0.0)

    @property
    def left_with_dials(self) -> float:
        """Seconds until the deadline, if the rest of the time for dials is used, too."""
        return self.left + self._dial_seconds

    def note_wait(self, seconds: float) -> None:
        """`seconds` were waited for another operation's dials."""
        self._dial_seconds = max(0.0, self._dial_seconds - max(0.0, seconds))

    def calling(self, share: float) -> asyncio.Timeout:
        """The deadline of a call that may take `share` of the time left."""
        return asyncio.timeout_at(self._clock() + share * self.left)

    @asynccontextmanager
    async def dialling(self, share: float, *, hangs: bool) -> AsyncIterator[asyncio.Timeout]:
        """The deadline of a dial that may take `share` of the time left for dials.

        If the server `hangs`, as far as is known, the dial takes its time from the call.
        """
        started = self._clock()
        seconds = min(self._dial_seconds, self.left) if hangs else self._dial_seconds
        try:
            async with asyncio.timeout_at(started + share * seconds) as deadline:
                yield deadline
        finally:
            spent = min(self._clock() - started, self._dial_seconds)
            self._dial_seconds -= spent
            if not hangs:
                self._at += spent


class Server:
    """Calls of one server. All methods run on one loop.

    `losses` counts restarts and replacements: another process answers than before.
    """

    def __init__(self, endpoint: Endpoint, access: Access, purpose: str = "calls") -> None:
        self.endpoint = endpoint
        self.access = access
        self.losses = 0
        self._resets = 0
        self._purpose = purpose
        self._pool: ConnectionPool | None = None
        self._run_id = ""
        self._hangs = False
        self._asked_at = 0.0
        self._probe: asyncio.Task[None] | None = None
        self._dials: set[asyncio.Timeout] = set()
        """Deadlines of the dials under way."""
        self._closed = False

    async def exchange(
        self, commands: Sequence[Command], budget: Budget | None = None, *, share: float = 1.0
    ) -> list[Reply]:
        """Send commands, and read the reply to each, in one round trip.

        Raises StoreUnavailable. `share` limits dial and call to a part of the budget's time, so
        that another server can be called if this one hangs.
        """
        budget = budget or Budget.of(self.access)
        pool, connection = await self._take(budget, share)
        began = self._now()
        try:
            async with budget.calling(share):
                await connection.send_packed_command(pack(commands))
                replies = await read_replies(connection, len(commands))
        except BaseException as error:
            # Replies may still arrive, so the connection cannot be used again.
            abort(connection)
            await connection.disconnect(nowait=True)
            if isinstance(error, (*FAILURES, TimeoutError)):
                raise self.unavailable(error, self._now() - began) from error
            raise
        finally:
            if pool is not self._pool or self._closed:
                await connection.disconnect(nowait=True)
            await pool.release(connection)
        self._hangs = False
        return replies

    @property
    def incarnation(self) -> Incarnation:
        return self._run_id, self._resets

    @property
    def hangs(self) -> bool:
        """Whether the last call got no answer in time. Then it is probed in the background, for as
        long as somebody asks."""
        self._asked_at = self._now()
        if self._hangs and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_until_it_answers())
        return self._hangs

    async def reset(self) -> None:
        """Connect anew with the next call: the server takes no more writes, and its address may
        lead to another one by now."""
        pool, self._pool = self._pool, None
        if not self._run_id:  # else the next login shows whether another one answers
            self._resets += 1
        if pool is not None:
            with suppress(*FAILURES):
                await pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Close all connections. Calls in flight end with StoreUnavailable. Idempotent."""
        self._closed = True
        for deadline in self._dials:
            if not deadline.expired():
                deadline.reschedule(0.0)
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        if self._pool is not None:
            with suppress(*FAILURES):  # a server that hangs does not end TLS
                await self._pool.disconnect()

    async def _take(
        self, budget: Budget, share: float
    ) -> tuple[ConnectionPool, AbstractConnection]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        began = self._now()
        try:
            async with budget.dialling(share, hangs=self._hangs) as deadline:
                self._dials.add(deadline)
                try:
                    pool = self._connections()
                    return pool, await pool.get_connection()
                finally:
                    self._dials.discard(deadline)
        except (*FAILURES, TimeoutError) as error:
            # redis-py before 7 raises a plain ConnectionError at the limit.
            if isinstance(error, MaxConnectionsError) or str(error) == "Too many connections":
                raise StoreUnavailable(
                    f"store {self.endpoint}: at the limit of {self.access.connections_max} calls "
                    "in flight; use fewer threads"
                ) from error
            raise self.unavailable(error, self._now() - began) from error

    def _connections(self) -> ConnectionPool:
        if self._pool is None:  # made late: it reads the TLS files
            self._pool = self.access.pool(self.endpoint, self._purpose, self.logged_in)
        return self._pool

    def logged_in(self, run_id: str) -> None:
        """A connection reached the server with this run id; "" if it does not say."""
        if self._run_id and run_id and self._run_id != run_id:
            self.losses += 1
        self._run_id = run_id or self._run_id

    def unavailable(self, error: BaseException, waited_seconds: float = math.inf) -> StoreError:
        """The error for what a connection raised; a StoreError stays.

        A server that had but the rest of a budget to answer is not taken for one that hangs.
        """
        if isinstance(error, StoreError):
            return error
        name = f"store {self.endpoint}"
        if isinstance(error, REFUSALS):  # of the login
            why = f"{name} refuses the login: {code_of(error) or 'ERR'}"
            source = self.access.credentials
            return StoreRefused(why if source is None else f"{why}; {source}")
        if self._closed:
            return StoreUnavailable("the store is closed")
        if isinstance(error, TimeoutError | ConnectTimeoutError):
            access = self.access
            patience = min(access.call_timeout_seconds, access.connect_timeout_seconds)
            self._hangs |= waited_seconds >= patience * HANGS_SHARE
            return StoreUnavailable(f"{name}: no answer in time")
        return StoreUnavailable(f"{name}: {reason_of(error)}")

    async def _probe_until_it_answers(self) -> None:
        pause = PROBE_SECONDS_MIN
        while self._hangs and not self._closed and self._now() < self._asked_at + PROBED_SECONDS:
            try:
                await self.exchange([("PING",)], Budget(PROBE_ANSWER_SECONDS, PROBE_ANSWER_SECONDS))
            except StoreUnavailable:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PROBE_SECONDS_MAX)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
