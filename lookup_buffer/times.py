"""Times that must agree across modules, derived from one another. All are seconds.

A time that one module alone uses stands there.
"""

from typing import Final

# -- a client's call of its node

CALL_SECONDS: Final = 1.0
"""How long a client waits for a reply, beyond what it asked the node to wait."""
NODE_SHARE: Final = 0.9
"""The part of a caller's time that the node may use up: its answer takes its own to come."""
CLAIM_ANSWER_SECONDS: Final = 0.4
"""How long the store may take to decide a claim; after that the node grants it unasked."""
INSERT_LEAST_SECONDS: Final = 0.5
"""How long an insert of a hand-off waits for the store, also where its client does not wait."""
assert CLAIM_ANSWER_SECONDS < NODE_SHARE * CALL_SECONDS, "the node answers before the client ends"
assert INSERT_LEAST_SECONDS < NODE_SHARE * CALL_SECONDS, "the node answers before the client ends"

# -- an intent: a claim of an engine that is about to encode

INTENT_SECONDS_MAX: Final = 1.0
"""The lease of an intent at the node: who only means to produce a key keeps others waiting for no
longer."""
PROMISE_SECONDS: Final = 0.4
"""So long before an intent lapses the store is told at the latest that it came to encoding."""
INTENT_SECONDS: Final = INTENT_SECONDS_MAX - PROMISE_SECONDS
"""How long an engine relies on an intent. What it says of its encode by then is at the node in time
to be told to the store, also on a host that is short of processors."""
assert INTENT_SECONDS > 0
assert CLAIM_ANSWER_SECONDS <= PROMISE_SECONDS, "the store's answer comes before the intent lapses"

# -- a leased hand-off

LEASE_ANSWER_SECONDS: Final = 1.0
"""So long after the end of a lease, an acknowledgement that counted has been answered."""
REMEMBERED_SECONDS: Final = LEASE_ANSWER_SECONDS + CALL_SECONDS
"""That an acknowledgement counted is remembered for the lease's time and so long. A taker whose
link broke asks again for `LEASE_ANSWER_SECONDS` after it, and a client for a call's time more."""
HANDOFF_GONE_SECONDS: Final = 60
"""How long the store keeps why a hand-off went: they are many, and each is taken soon."""

# -- heartbeats and who is dead

BEAT_SECONDS: Final = 1.0
"""Between two beats of a node, and between two readings of all beats."""
DEATH_CHECK_SECONDS: Final = 0.25
"""How often a node checks who has died: by its clock, also while the store is away."""
WATCH_SECONDS: Final = 3 * BEAT_SECONDS
"""How long a node watches another boot with its own id: that would have beaten three times."""
BLIND_SECONDS: Final = 3 * BEAT_SECONDS
"""After a longer pause between readings nobody's silence before it counts: the store may have been
away for all nodes."""
DEAD_AFTER_SECONDS: Final = 4.5 * BEAT_SECONDS
"""A node whose beat stands still for so long is dead."""
DEATH_NOTICED_SECONDS: Final = 6.0
"""By then every node has noticed a death."""
STALL_SECONDS: Final = 8 * DEATH_CHECK_SECONDS
"""A node whose ticks are so late was stopped or starved; its clients have given up."""
SILENT_SECONDS: Final = 2 * BEAT_SECONDS
"""A beat and a slow machine's delay: commands show a node that is silent for so long as not
alive."""
LONG_DEAD_SECONDS: Final = 60.0
"""A node that was silent for so long is evicted, and what it had is withdrawn: a node that was only
frozen then has to publish all it has anew."""
assert DEAD_AFTER_SECONDS + BEAT_SECONDS + DEATH_CHECK_SECONDS <= DEATH_NOTICED_SECONDS
assert SILENT_SECONDS < BLIND_SECONDS < DEAD_AFTER_SECONDS, "a pause of the store kills nobody"
assert STALL_SECONDS < DEAD_AFTER_SECONDS, "a stalled node calls nobody dead"
assert STALL_SECONDS > CALL_SECONDS, "clients have given up by then"
assert LONG_DEAD_SECONDS > DEATH_NOTICED_SECONDS, "dead to all before it is evicted"

# -- one node to another

PEER_CONNECT_SECONDS: Final = 1.0
PEER_SEND_SECONDS: Final = 2.0
"""Bound on the send of a request or a reply; payload has a bound by its size."""
PEER_ANSWER_SECONDS: Final = PEER_SEND_SECONDS
"""Bound on the wait for another node's answer."""
OWNER_IDLE_SECONDS: Final = 60.0
"""A connection for hand-offs that is unused for so long, beyond its leases, is closed."""
PEER_IDLE_SECONDS: Final = 300.0
"""A node closes a connection on which nothing was asked for so long."""
assert OWNER_IDLE_SECONDS < PEER_IDLE_SECONDS, "the side that asks closes first"

# -- what outlives its node or its session

QUARANTINE_SECONDS: Final = 120.0
"""Longer than any engine step: how long the pins of a lost session outlive its connection."""
ORPHANED_SECONDS: Final = QUARANTINE_SECONDS
"""How long a ticket of a device's pool outlives the node that it came from."""
assert QUARANTINE_SECONDS > DEATH_NOTICED_SECONDS
