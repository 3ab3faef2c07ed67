"""The record of a key: dtype and shape of the tensor, and the nodes that hold it.

Plain values, used by every layer above, independent of Redis and of sockets. They are named tuples
because a look-up creates many of them: creating a frozen dataclass takes four times as long. A
mirror keeps as many, and a fleet has few boots and pools, so their texts are interned: each is in
memory once.
"""

import re
import sys
from contextlib import suppress
from typing import Final, NamedTuple

INTERNS_FOREVER: Final = (3, 12) <= sys.version_info < (3, 12, 7)
"""Python keeps each interned text until the process ends (python/cpython#113993): text from outside
must not be interned there."""
_interned = str if INTERNS_FOREVER else sys.intern

LOCATIONS_MAX = 4
"""Nodes in one record. More copies do not help a reader and make the record larger."""

POOLS_MAX = 16
"""Pools in a node's description: one for each of its processes that have a device."""

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
"""Node ids and namespaces. They are parts of key names and come before colons, so no other
characters are allowed.
"""

DEVICE = re.compile(r"[ -~]{1,12}\Z")
"""Name of the hardware that computed a tensor. Each record holds one, so it is short: with a longer
one a record with 3 copies takes more than 600 bytes in Redis 7.0.
"""

BOOT = re.compile(r"[A-Za-z0-9]{1,24}\Z")
_LOCATION = re.compile(r"([A-Za-z0-9]{1,24}):([1-9][0-9]{0,15}):([0-9a-f]{16})\Z")
_POOL = re.compile(r"(gloo|nccl):([0-9a-f]{8}):([0-9]{1,5}):([0-9a-f]{12})\Z")
_DEVICE = re.compile(rf"([1-9][0-9]{{0,15}}):{_POOL.pattern}")
_POOLS_BYTES_MAX = 4096
_GENERATION_LIMIT = 2**53  # Lua numbers are doubles: above this, two generations compare equal
_CHECKSUM_LIMIT = 2**64
_NBYTES_LIMIT = 2**63


class Location(NamedTuple):
    """One copy of a key's bytes.

    `boot` changes with every start of the node and `generation` with every insert, so the node that
    it names can recognise a stale location. Copies may differ in checksum: two devices may encode
    one image to slightly different bytes.
    """

    node: str
    boot: str
    generation: int
    checksum: int

    @property
    def text(self) -> str:
        """The stored form. At most 64 bytes: with more, the server abandons the record's compact
        encoding.
        """
        return f"{self.boot}:{self.generation}:{self.checksum:016x}"

    @property
    def is_offer(self) -> bool:
        """Whether the bytes wait for admission: the hand-off can be taken, but not read."""
        return self.checksum == 0

    @classmethod
    def parse(cls, node: str, text: str) -> "Location":
        """The reverse of `text`; `node` is not checked. Raises ValueError for other text."""
        match = _LOCATION.match(text)
        if not match:
            raise ValueError("not a location")
        boot, generation, checksum = match.groups()
        return cls(node, _interned(boot), int(generation), int(checksum, 16))

    def check(self) -> None:
        """Raise ValueError unless the store may hold this location."""
        if not SAFE_NAME.match(self.node):
            raise ValueError(f"node id {self.node!r}: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")
        if not BOOT.match(self.boot):
            raise ValueError(f"boot id {self.boot!r}: 1 to 24 letters and digits are allowed")
        if not 1 <= self.generation < _GENERATION_LIMIT:
            raise ValueError(f"generation {self.generation}: 1 to 2**53 - 1 are allowed")
        if not 0 <= self.checksum < _CHECKSUM_LIMIT:
            raise ValueError(f"checksum {self.checksum}: 64 bits are allowed")


class DeviceLocation(NamedTuple):
    """The same bytes as a node's copy, on the device of one of that node's processes.

    A process with a device of its own may read them over a lane of that `kind`. The entry is valid
    while both the copy and the process exist. Each process draws a random `pool`, and `mark` is the
    pool's number for the entry, so a stale entry is recognised.
    """

    node: str
    mark: int
    kind: str
    """gloo or nccl: what transfers the bytes."""
    library: str
    """Eight hex digits that distinguish incompatible library versions."""
    port: int
    """Port of the pool, on the host of the node's endpoint."""
    pool: str

    @property
    def text(self) -> str:
        """The stored form. At most 64 bytes, like that of a Location."""
        return f"{self.mark}:{self.kind}:{self.library}:{self.port}:{self.pool}"

    @classmethod
    def parse(cls, node: str, text: str) -> "DeviceLocation":
        """The reverse of `text`. Raises ValueError for other text."""
        match = _DEVICE.match(text)
        if not match:
            raise ValueError("not a device location")
        mark, kind, library, port, pool = match.groups()
        return cls(node, int(mark), _interned(kind), _interned(library), int(port), _interned(pool))

    def check(self) -> None:
        """Raise ValueError unless the store may hold this location."""
        if not SAFE_NAME.match(self.node) or not 1 <= self.port <= 65535:
            raise ValueError(
                f"device location of node {self.node!r}, port {self.port}: a node id of 1 to 128 "
                "of A-Z a-z 0-9 . _ - and a port of 1 to 65535 are required"
            )
        self.parse(self.node, self.text)


class PoolEndpoint(NamedTuple):
    """Where a process of a node serves its device pool to others; see `DeviceLocation`."""

    kind: str
    library: str
    port: int
    pool: str

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.library}:{self.port}:{self.pool}"

    @classmethod
    def parse(cls, text: str) -> "PoolEndpoint":
        """The reverse of `text`. Raises ValueError for other text."""
        match = _POOL.match(text)
        if not match or not 1 <= int(match[3]) <= 65535:
            raise ValueError("not a pool endpoint")
        kind, library, port, pool = match.groups()
        return cls(kind, library, int(port), pool)

    @classmethod
    def parse_all(cls, value: bytes) -> "tuple[PoolEndpoint, ...]":
        """The pools in a node's description, separated by spaces.

        Unknown forms are skipped: a newer version may add some.
        """
        pools = []
        for text in value[:_POOLS_BYTES_MAX].decode("ascii", "replace").split():
            with suppress(ValueError):
                pools.append(cls.parse(text))
        return tuple(pools[:POOLS_MAX])


class Record(NamedTuple):
    """What is known of one key. `created` is the first publisher's wall clock, for people only."""

    namespace: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    created: float
    locations: tuple[Location, ...] = ()
    devices: tuple[DeviceLocation, ...] = ()
    """At most one for each of `locations`, of the same node."""
    device: str = ""
    """Hardware on which the first publisher computed the bytes, such as cpu or H200. For people
    only; empty if unknown.
    """

    def check(self) -> None:
        """Raise ValueError unless the store may hold this record."""
        check_namespace(self.namespace)
        if not self.key:
            raise ValueError("the key is empty: at least one character is required")
        if self.kind not in ("tensor", "none"):
            raise ValueError(f"kind {self.kind!r}: 'tensor' and 'none' are allowed")
        if any(dimension < 0 for dimension in self.shape):
            raise ValueError(f"shape {self.shape}: dimensions of 0 or more are allowed")
        if not 0 <= self.nbytes < _NBYTES_LIMIT:
            raise ValueError(f"nbytes {self.nbytes}: 0 to 2**63 - 1 are allowed")
        if self.device and not DEVICE.match(self.device):
            raise ValueError(
                f"device {self.device!r}: 1 to 12 printable ASCII characters are allowed"
            )


def check_namespace(namespace: str) -> None:
    """Raise ValueError if the text is no valid namespace."""
    if not SAFE_NAME.match(namespace):
        raise ValueError(f"namespace {namespace!r}: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")


def check_node(node: str, boot: str) -> None:
    """Raise ValueError if the texts are no valid node id and boot id."""
    Location(node, boot, 1, 0).check()


def check_token(token: str) -> None:
    """Raise ValueError if the text is no valid token of a claim."""
    if not SAFE_NAME.match(token):
        raise ValueError("token of a claim: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")
