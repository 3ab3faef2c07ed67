"""Times that must agree across modules, derived from one another. All are in seconds.

A time that only one module uses is defined there. Constants only, and the type of a clock;
assertions check at import that they agree.
"""

from collections.abc import Callable
from typing import Final

Clock = Callable[[], float]
"""Returns a time in seconds, of a monotonic clock where nothing else is said. Bookkeeping gets it
as an argument."""

TURN_SECONDS: Final = 0.02
"""Work of many parts holds a node's loop for about this long, or for one part; it goes on in the
next turn of the loop, after what others wait for."""

# -- a client's call of its node

CALL_SECONDS: Final = 1.0
"""How long a client waits for a reply, in addition to the wait that it requests of the node."""
NODE_SHARE: Final = 0.9
"""The fraction of a caller's time that the node may use; the rest is for its reply to arrive."""
CLAIM_ANSWER_SECONDS: Final = 0.4
"""How long the store may take to decide a claim; after that the node grants it without the
store."""
LOOK_UP_SECONDS_MIN: Final = 0.05
LOOK_UP_SECONDS_MAX: Final = 0.8
"""Bounds on the time in which a node answers a `has_caches` without a timeout. Between them that
time follows the round trip to the store."""
INSERT_LEAST_SECONDS: Final = 0.5
"""How long an insert of a hand-off waits for the store, at least; also if its client does not
wait."""
assert CLAIM_ANSWER_SECONDS < NODE_SHARE * CALL_SECONDS, "the node answers before the client ends"
assert LOOK_UP_SECONDS_MAX < NODE_SHARE * CALL_SECONDS, "the node answers before the client ends"
assert INSERT_LEAST_SECONDS < NODE_SHARE * CALL_SECONDS, "the node answers before the client ends"

# -- an intent: a claim of an engine that is about to encode

INTENT_SECONDS_MAX: Final = 1.0
"""The lease of an intent at the node. A client that only intends to produce a key delays others no
longer than this."""
PROMISE_SECONDS: Final = 0.4
"""The node reports to the store that an intent became ENCODING at least this long before the
intent expires."""
INTENT_SECONDS: Final = INTENT_SECONDS_MAX - PROMISE_SECONDS
"""How long an engine relies on an intent. If it reports its encode by then, the node gets the
report early enough to pass it on to the store, even on a host short of processors."""
assert INTENT_SECONDS > 0
assert CLAIM_ANSWER_SECONDS <= PROMISE_SECONDS, "the store's answer comes before the intent lapses"

# -- a leased hand-off

LEASE_ANSWER_SECONDS: Final = 1.0
"""An acknowledgement that arrived within its lease is answered at most this long after the
lease's end."""
REMEMBERED_SECONDS: Final = LEASE_ANSWER_SECONDS + CALL_SECONDS
"""The owner stores a successful acknowledgement for the lease's time plus this. A taker whose
connection broke repeats it for `LEASE_ANSWER_SECONDS` after the lease, a client for `CALL_SECONDS`
more."""
HANDOFF_GONE_SECONDS: Final = 60
"""Seconds for which the store keeps the reason of a hand-off's removal. There are many hand-offs,
and each is soon taken, so this is short."""

# -- heartbeats and failure detection

BEAT_SECONDS: Final = 1.0
"""Time between two beats of a node, and between two reads of all nodes' beats."""
DEATH_CHECK_SECONDS: Final = 0.25
"""How often a node checks for dead nodes: by its own clock, also while the store is down."""
WATCH_SECONDS: Final = 3 * BEAT_SECONDS
"""How long a node watches for beats of another boot with its own id; a live one would beat three
times."""
BLIND_SECONDS: Final = 3 * BEAT_SECONDS
"""After a longer pause between reads, earlier silence of any node does not count: the store may
have been down for all nodes."""
DEAD_AFTER_SECONDS: Final = 4.5 * BEAT_SECONDS
"""A node whose beat does not advance for this long is dead."""
DEATH_NOTICED_SECONDS: Final = 6.0
"""Within this time every node detects the death of another."""
STALL_SECONDS: Final = 8 * DEATH_CHECK_SECONDS
"""A node whose ticks are this late was stopped or starved; its clients' calls have timed out."""
SILENT_SECONDS: Final = 2 * BEAT_SECONDS
"""One beat plus the delay of a slow machine. Commands show a node silent for this long as not
alive."""
LONG_DEAD_SECONDS: Final = 60.0
"""A node silent for this long is evicted and its records are withdrawn. If it was only frozen, it
must publish all its records again."""
assert DEAD_AFTER_SECONDS + BEAT_SECONDS + DEATH_CHECK_SECONDS <= DEATH_NOTICED_SECONDS
assert SILENT_SECONDS < BLIND_SECONDS < DEAD_AFTER_SECONDS, (
    "a pause of the store makes no node dead"
)
assert STALL_SECONDS < DEAD_AFTER_SECONDS, "a stalled node declares no node dead"
assert STALL_SECONDS > CALL_SECONDS, "the calls of its clients have timed out by then"
assert LONG_DEAD_SECONDS > DEATH_NOTICED_SECONDS, (
    "every node detects its death before it is evicted"
)

# -- one node to another

PEER_CONNECT_SECONDS: Final = 1.0
PEER_ANSWER_SECONDS: Final = 2.0
"""Bound on the send of a request to another node, and on the wait for its answer."""
PEER_PROGRESS_SECONDS: Final = 5.0
"""A transfer that makes no progress for this long is given up, at whatever rate it went before."""
OWNER_IDLE_SECONDS: Final = 60.0
"""A connection for hand-offs is closed this long after its last use and the end of its leases."""
PEER_IDLE_SECONDS: Final = 300.0
"""A node closes a connection without a request for this long."""
assert OWNER_IDLE_SECONDS < PEER_IDLE_SECONDS, "the requesting side closes first"

# -- a request that waits for a transfer

TRANSFER_NEWS_SECONDS: Final = 5.0
"""A client waits for so long after each message of its node that bytes are on their way."""
TRANSFER_TOLD_SECONDS: Final = 2.0
"""How often a node sends that message."""
assert TRANSFER_TOLD_SECONDS + CALL_SECONDS < TRANSFER_NEWS_SECONDS, "a busy node may be late"

# -- retention after the end of a node or a session

QUARANTINE_SECONDS: Final = 120.0
"""How long the pins of a lost session outlive its connection; longer than any engine step."""
ORPHANED_SECONDS: Final = QUARANTINE_SECONDS
"""How long a ticket of a device pool outlives the node that issued it."""
assert QUARANTINE_SECONDS > DEATH_NOTICED_SECONDS
