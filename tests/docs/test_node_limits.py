"""What the deployment files grant a node: the memory that its bounds allow it, and time to end.

The formula is that of docs/operations.md; the bounds are the constants of the code.
"""

import re
from typing import Any

import pytest
import yaml

from deployment import Service
from lookup_buffer.environment import parse_bytes
from lookup_buffer.key import MAX_KEY_CHARACTERS
from lookup_buffer.node import (
    arena,
    connection,
    counters,
    descriptions,
    devices,
    dirty_set,
    held_claims,
    locate,
    main,
    server,
    shares,
)
from nodes import MIB, ROOT
from store import mirror

GIB = 1 << 30
OPERATIONS = " ".join((ROOT / "docs/operations.md").read_text(encoding="utf-8").split())
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
FORMULA = r"`capacity_bytes`, a sixteenth of it and (\d+) GiB"

# Measured, by a node at its bounds; where a bound is a number of things.
IDLE_BYTES = 160 * MIB
"""Of the node and the dashboard's process: 100 MiB, and more while others look at pages."""
MIRRORED_BYTES = 2700
"""A record with four locations, each with a pool, and a key of 511 characters; 2.4 KB with 250."""
HIT_BYTES = 256
PIN_BYTES = 220
CLAIM_BYTES = OFFER_BYTES = 1200
"""Beside the text of the key."""
DIGEST_BYTES = 160
READ_BYTES = 4 << 10
"""A key that is being read from the store."""


def _granted_bytes(capacity: int) -> int:
    found = re.findall(FORMULA, OPERATIONS)
    assert len(set(found)) == 1
    return capacity + capacity // 16 + int(found[0]) * GIB


def _bounds(capacity: int) -> dict[str, int]:
    """What the node may come to hold beside the arena, each at its bound."""
    entries = max(arena.ENTRIES_BYTES_MIN, int(capacity * arena.ENTRIES_FRACTION))
    in_any_case = server.CONNECTIONS_MAX * connection.PENDING_OWN_BYTES
    return {
        "idle": IDLE_BYTES,
        "items": entries,
        "addresses of a walk whose items went": entries,
        "mirror": mirror.ENTRIES_MAX * MIRRORED_BYTES,
        "not written to the store": dirty_set.WAITING_BYTES_MAX,
        "written recently": dirty_set.RECENT_BYTES_MAX,
        "hits": counters.HITS_KEYS_MAX * HIT_BYTES + counters.HITS_CHARACTERS_MAX,
        "pending of clients": connection.PENDING_TOTAL_BYTES + in_any_case,
        "pending of nodes": connection.PEERS_TOTAL_BYTES + in_any_case,
        "requests that wait": shares.REQUEST_BYTES
        * (connection.WAITS_MAX + server.CONNECTIONS_MAX * connection.WAITS_OWN),
        "keys being read": locate.READING_MAX * READ_BYTES,
        "pins": arena.PINS_MAX * PIN_BYTES,
        "claims": held_claims.CLAIMS_MAX * (CLAIM_BYTES + MAX_KEY_CHARACTERS),
        "offers": devices.OFFERS_MAX * (OFFER_BYTES + MAX_KEY_CHARACTERS),
        "received by pools": devices.KNOWN_MAX * DIGEST_BYTES,
        "descriptions": descriptions.DESCRIPTIONS_MAX * descriptions.BYTES_MAX,
    }


def _compose() -> list[tuple[int, int, int]]:
    services = [Service(name) for name in ("node-a", "node-b")]
    return [
        (
            _bytes(one.environment["LOOKUP_BUFFER_CAPACITY_BYTES"]),
            _bytes(one.raw["mem_limit"]),
            _bytes(one.raw["memswap_limit"]),
        )
        for one in services
    ]


def _kubernetes() -> dict[str, Any]:
    text = (ROOT / "deploy/kubernetes/node.yaml").read_text(encoding="utf-8")
    (found,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "DaemonSet")
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def _bytes(text: str) -> int:
    nbytes = parse_bytes(text)
    assert isinstance(nbytes, int), text
    return nbytes


@pytest.mark.parametrize("capacity", [64 * MIB, GIB, 16 * GIB, 1024 * GIB])
def test_the_documented_limit_covers_all_that_a_node_may_hold(capacity: int) -> None:
    bounds = _bounds(capacity)
    assert capacity + sum(bounds.values()) <= _granted_bytes(capacity), bounds


def test_the_compose_file_grants_its_nodes_that_much() -> None:
    """The arena is shared memory, which counts as well."""
    for capacity, limit, with_swap in _compose():
        assert limit == with_swap == _granted_bytes(capacity)


def test_the_kubernetes_files_grant_their_nodes_that_much() -> None:
    (node,) = _kubernetes()["containers"]
    given = {each["name"]: each.get("value", "") for each in node["env"]}
    capacity = _bytes(given["LOOKUP_BUFFER_CAPACITY_BYTES"])
    assert _bytes(node["resources"]["limits"]["memory"] + "B") == _granted_bytes(capacity)


def test_a_node_is_a_bug_only_beyond_it() -> None:
    (row,) = (line for line in METRICS.splitlines() if "`process_resident_memory_bytes`" in line)
    (stated,) = re.findall(FORMULA, row)
    assert int(stated) * GIB == _granted_bytes(0)


def test_nodes_have_the_time_to_end_that_they_may_take() -> None:
    """Killed before, a node does not say which of its parts did not end."""
    given = [_kubernetes()["terminationGracePeriodSeconds"]]
    for name in ("node-a", "node-b"):
        (seconds,) = re.fullmatch(r"(\d+)s", Service(name).raw["stop_grace_period"]).groups()  # type: ignore[union-attr]
        given.append(int(seconds))
    assert min(given) >= main.END_SECONDS + 2
