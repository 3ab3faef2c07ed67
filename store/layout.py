"""The key layout: the names, types and texts of all keys in Redis.

A documented, versioned contract (docs/redis-keys.md): other programs, and people with redis-cli,
may rely on it. The fields of a record are in `record_fields`.

| key                    | type          | holds                                                  |
|------------------------|---------------|--------------------------------------------------------|
| lb:rec:<ns>:{<key>}    | HASH, expires | v, dtype, shape, nbytes, kind, created, sometimes      |
|                        |               | device and key;                                        |
|                        |               | per location at:<node> = boot:generation:checksum;     |
|                        |               | if a process of that node also has the bytes on its    |
|                        |               | device, on:<node> = mark:kind:library:port:pool        |
| lb:claim:<ns>:{<key>}  | STRING, lease | <holder>:<state>:<token>: the claimant that will       |
|                        |               | produce the key (state intent) or is producing it      |
|                        |               | (encoding); a node's holder is <node>:<boot>:<since>   |
| lb:gone:<ns>:{<key>}   | STRING, 1 h   | <reason>:<node>: why the last location was removed,    |
|                        |               | and whose it was (of hand-offs for a minute)           |
| lb:fail:<ns>:{<key>}   | STRING, 1 h   | <reason>:<holder>:<reader>: the last failed fetch      |
| lb:nodes               | HASH          | <node> = boot:sequence, increased by each beat         |
| lb:node:<node>         | HASH, 1 day   | boot, endpoint, host, version, capacity, used, items,  |
|                        |               | claims, pools                                          |
| lb:left:<node>         | STRING, 1 day | <reason>:<boot>: how a node ended (stopped, died)      |
| lb:ns:<ns>             | HASH, 7 days  | the parts of the namespace in clear text               |
| lb:invalid             | HASH, 7 days  | <ns> = id:seconds since 1970, of its invalidation      |
| lb:hits:<ns>           | ZSET, 7 days  | hits per key, the 10,000 highest                       |
| lb:stats:<node>        | HASH, 7 days  | the node's counters                                    |

<ns> is the namespace's whole fingerprint. <key> is the key itself if it is short and has only safe
characters, else "h." and the hex of a 128-bit hash. Hashes can collide, so such a record has the
raw key as a field, which every read and write compares. Other records have no such field: it would
be 150 bytes of 600.
The braces place all keys of one item in one slot of Redis Cluster, as the scripts require.

A change that an older reader would misunderstand raises VERSION. Records of another version are a
miss for readers and a conflict for publishers, until they expire.
"""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

from store.answers import COUNTER_MAX, Beat, Failure, Invalidation, NodeInfo, ServerInfo
from store.record import BOOT, SAFE_NAME, PoolEndpoint

VERSION = "1"

NODES = "lb:nodes"
NODE_SECONDS = 24 * 3600
LEFT_SECONDS = 24 * 3600
FAIL_SECONDS = 3600
INVALID = "lb:invalid"
INVALID_SECONDS = 7 * 24 * 3600
NAMESPACE_SECONDS = 7 * 24 * 3600
HITS_SECONDS = 7 * 24 * 3600
STATS_SECONDS = 7 * 24 * 3600
HITS_MAX = 10_000

# ':' would be safe too, but in a name it separates the parts for readers.
_SPELLED_CHARACTERS_MAX = 128
_SAFE_KEY = re.compile(rf"[A-Za-z0-9._%#@=+,/-]{{1,{_SPELLED_CHARACTERS_MAX}}}\Z")
_COUNTER_NAME = re.compile(rb"[a-z0-9_]{1,64}")
_COUNTERS_MAX = 512  # a node has about 100
_NAME_BYTES_MAX = 128  # see SAFE_NAME
_VALUE_BYTES_MAX = 64
"""Of a boot, a beat, the mark of an invalidation."""
_TEXT_BYTES_MAX = 512
"""Of a node's endpoint, host and version. The name of a host has at most 253."""
HASHED = "h."
"""Prefix of a name that is the hash of a key."""


def key_name(key: str) -> str:
    """The text in the braces for `key`."""
    return key if _is_spelled_out(key) else _hashed(key)


def _is_spelled_out(key: str) -> bool:
    if key.isascii() and key.encode().isalnum():  # most keys are digests: skips the slow pattern
        return len(key) <= _SPELLED_CHARACTERS_MAX
    # Keys that look like a hash are hashed as well, so no key can pass for another key's hash.
    return bool(_SAFE_KEY.match(key)) and not key.startswith(HASHED)


@lru_cache(maxsize=1024)  # record, claim and tombstone of one key are named in a row
def _hashed(key: str) -> str:
    return HASHED + hashlib.blake2b(_raw(key), digest_size=16).hexdigest()


def _raw(key: str) -> bytes:
    # surrogatepass: any str is a valid key, also one from undecodable bytes.
    return key.encode("utf-8", "surrogatepass")


def record(namespace: str, key: str) -> str:
    return f"lb:rec:{namespace}:{{{key_name(key)}}}"


def claim(namespace: str, key: str) -> str:
    return f"lb:claim:{namespace}:{{{key_name(key)}}}"


def gone(namespace: str, key: str) -> str:
    return f"lb:gone:{namespace}:{{{key_name(key)}}}"


def fail(namespace: str, key: str) -> str:
    return f"lb:fail:{namespace}:{{{key_name(key)}}}"


def records(namespace: str | None) -> str:
    """The SCAN pattern of all records, or of one namespace's."""
    return f"lb:rec:{namespace or '*'}:{{*"


def node(name: str) -> str:
    return f"lb:node:{name}"


def left(node: str) -> str:
    return f"lb:left:{node}"


def namespace(fingerprint: str) -> str:
    return f"lb:ns:{fingerprint}"


def hits(namespace: str) -> str:
    return f"lb:hits:{namespace}"


def stats(node: str) -> str:
    return f"lb:stats:{node}"


def key_field(key: str) -> bytes:
    """The value that the record's field `key` must have; empty if it has no such field."""
    return b"" if _is_spelled_out(key) else _raw(key)


def gone_beside(record_name: str) -> str:
    """The name of the tombstone that belongs to the record `record_name`."""
    return "lb:gone:" + record_name.removeprefix("lb:rec:")


def read_invalidations(fields: Mapping[bytes, bytes]) -> dict[str, Invalidation]:
    """The mark of each namespace. Garbled entries are left out."""
    found = {}
    for name, value in fields.items():
        with suppress(ValueError):
            mark = Invalidation.parse(_short(value, _VALUE_BYTES_MAX))
            found[_short(name, _NAME_BYTES_MAX)] = mark
    return found


def node_fields(info: NodeInfo) -> list[str | int]:
    """A node's description as fields and values, alternating."""
    claims: list[str | int] = [] if info.claims is None else ["claims", info.claims]
    return [
        "boot", info.boot, "endpoint", info.endpoint, "host", info.host, "version", info.version,
        "capacity", info.capacity_bytes, "used", info.used_bytes, "items", info.items, *claims,
        "pools", " ".join(pool.text for pool in info.pools),
    ]  # fmt: skip


def read_node(name: str, fields: Mapping[bytes, bytes]) -> NodeInfo | None:
    """The reverse of `node_fields`; None if absent or garbled."""
    try:
        return NodeInfo(
            node=name,
            boot=_short(fields[b"boot"], _VALUE_BYTES_MAX),
            endpoint=_short(fields[b"endpoint"], _TEXT_BYTES_MAX),
            host=_short(fields[b"host"], _TEXT_BYTES_MAX),
            version=_short(fields[b"version"], _TEXT_BYTES_MAX),
            capacity_bytes=read_count(fields[b"capacity"]),
            used_bytes=read_count(fields[b"used"]),
            items=read_count(fields[b"items"]),
            claims=read_count(fields[b"claims"]) if b"claims" in fields else None,
            pools=PoolEndpoint.parse_all(fields.get(b"pools", b"")),
        )
    except (KeyError, ValueError):
        return None


def fail_value(failure: Failure) -> str:
    return f"{failure.reason}:{failure.holder}:{failure.reader}"


def read_failure(namespace: str, key: str, value: bytes) -> Failure | None:
    """The reverse of `fail_value`; None if garbled."""
    reason, _, nodes = value.decode("utf-8", "replace").partition(":")
    holder, colon, reader = nodes.partition(":")
    return Failure(namespace, key, reason, holder, reader) if colon else None


def read_hits(score: bytes | None) -> int:
    """A score as nodes write it, clamped: a person may have written any number, infinity too."""
    return int(min(max(float(score or 0), 0.0), 2.0**63))


def read_beats(fields: Mapping[bytes, bytes]) -> dict[str, Beat]:
    """The beats in lb:nodes. Garbled entries are left out."""
    found = {}
    for name, value in fields.items():
        node = name[: _NAME_BYTES_MAX + 1].decode("ascii", "replace")
        beat = read_beat(value)
        if beat and SAFE_NAME.match(node):
            found[node] = beat
    return found


def read_beat(value: bytes) -> Beat | None:
    """The beat in a field of lb:nodes; None if garbled."""
    if len(value) > _VALUE_BYTES_MAX:
        return None
    boot, _, sequence = value.partition(b":")
    try:
        beat = Beat(boot.decode("ascii"), read_count(sequence))
    except ValueError:
        return None
    return beat if BOOT.match(beat.boot) else None


def read_counters(fields: Mapping[bytes, bytes]) -> dict[str, int]:
    """A node's counters. What is no name of one, or no count, is left out."""
    counters: dict[str, int] = {}
    for name, value in fields.items():
        if len(counters) == _COUNTERS_MAX:
            break
        try:
            count = int(value)
        except ValueError:
            continue
        if 0 <= count <= COUNTER_MAX and _COUNTER_NAME.fullmatch(name):
            counters[name.decode()] = count
    return counters


def read_server_info(text: str) -> ServerInfo:
    """The reply to INFO. Valkey reports itself as a Redis too, so its own name and version come
    first.
    """
    lines = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    info = {name: value.strip() for name, _, value in lines}
    return ServerInfo(
        product=info.get("server_name", "redis"),
        version=info.get("valkey_version", info.get("redis_version", "")),
        maxmemory_bytes=int(info.get("maxmemory", "0")),
        used_memory_bytes=int(info.get("used_memory", "0")),
        policy=info.get("maxmemory_policy", ""),
        mode=info.get("server_mode", info.get("redis_mode", "")),
    )


def _short(text: bytes, bytes_max: int) -> str:
    """Raises ValueError for text that is longer, and so not a node's: readers keep what they read,
    and who can write the store may write any length."""
    if len(text) > bytes_max:
        raise ValueError("too long")
    return text.decode()


def read_count(text: bytes) -> int:
    """A number as nodes write it. Raises ValueError for other text."""
    if len(text) > 19 or not text.isdigit():
        raise ValueError("not a count")
    return int(text)
