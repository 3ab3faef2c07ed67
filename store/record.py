"""What the store says of one key: shape and type of the tensor, and which nodes hold it.

Plain values, used by every layer above. They know neither Redis nor sockets. Named tuples, for a
look-up makes many of them, and a frozen dataclass takes four times as long to make.
"""

import re
from contextlib import suppress
from typing import NamedTuple

LOCATIONS_MAX = 4
"""Nodes named in one record. More copies bring a reader nothing and make the record grow."""

POOLS_MAX = 16
"""Pools that a node names: one for each of its processes that have a device."""

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
"""Node ids and namespaces: they stand in key names and before colons, so no other characters."""

DEVICE = re.compile(r"[ -~]{1,12}\Z")
"""Name of what computed something. Each record holds one, so it is short: with more, a record of 3
copies takes more than 600 bytes of a Redis 7.0."""

_BOOT = re.compile(r"[A-Za-z0-9]{1,24}\Z")
_LOCATION = re.compile(r"([A-Za-z0-9]{1,24}):([1-9][0-9]{0,15}):([0-9a-f]{16})\Z")
_POOL = re.compile(r"(gloo|nccl):([0-9a-f]{8}):([0-9]{1,5}):([0-9a-f]{12})\Z")
_DEVICE = re.compile(rf"([1-9][0-9]{{0,15}}):{_POOL.pattern}")
_POOLS_BYTES_MAX = 4096
_GENERATION_LIMIT = 2**53  # Lua has only doubles; above this two generations would look alike
_CHECKSUM_LIMIT = 2**64
_NBYTES_LIMIT = 2**63


class Location(NamedTuple):
    """One copy of a key's bytes.

    `boot` changes with every start of the node and `generation` with every insert, so a location
    that has gone stale is recognised by the node it names. Two copies may differ in checksum: two
    devices may encode the same image to slightly different bytes.
    """

    node: str
    boot: str
    generation: int
    checksum: int

    @property
    def text(self) -> str:
        """At most 64 bytes: beyond that the server gives up its compact form of the record."""
        return f"{self.boot}:{self.generation}:{self.checksum:016x}"

    @property
    def is_offer(self) -> bool:
        """Whether the node has no room for the bytes as yet: a hand-off to be taken, not read."""
        return self.checksum == 0

    @classmethod
    def parse(cls, node: str, text: str) -> "Location":
        """The reverse of `text`; `node` is taken as it is. Raises ValueError for anything else."""
        match = _LOCATION.match(text)
        if not match:
            raise ValueError("not a location")
        boot, generation, checksum = match.groups()
        return cls(node, boot, int(generation), int(checksum, 16))

    def check(self) -> None:
        """Raise ValueError unless the store may hold this location."""
        if not SAFE_NAME.match(self.node):
            raise ValueError(f"node id {self.node!r}: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")
        if not _BOOT.match(self.boot):
            raise ValueError(f"boot id {self.boot!r}: 1 to 24 letters and digits are allowed")
        if not 1 <= self.generation < _GENERATION_LIMIT:
            raise ValueError(f"generation {self.generation}: 1 to 2**53 - 1 are allowed")
        if not 0 <= self.checksum < _CHECKSUM_LIMIT:
            raise ValueError(f"checksum {self.checksum}: 64 bits are allowed")


class DeviceLocation(NamedTuple):
    """The bytes of a node's copy, as a process of that node also has them on its device.

    A process that has a device of its own may take them from there, by a lane of that `kind`. It
    goes with the copy beside which it stands, and with the process: `pool` is drawn anew by each,
    `mark` is the pool's number for the entry, so one that has gone stale is recognised.
    """

    node: str
    mark: int
    kind: str
    """gloo or nccl: what moves the bytes."""
    library: str
    """Eight hex digits that tell versions apart which cannot talk to each other."""
    port: int
    """Of the pool, on the host of the node's endpoint."""
    pool: str

    @property
    def text(self) -> str:
        """At most 64 bytes, as a location's."""
        return f"{self.mark}:{self.kind}:{self.library}:{self.port}:{self.pool}"

    @classmethod
    def parse(cls, node: str, text: str) -> "DeviceLocation":
        """The reverse of `text`. Raises ValueError for anything else."""
        match = _DEVICE.match(text)
        if not match:
            raise ValueError("not a location on a device")
        mark, kind, library, port, pool = match.groups()
        return cls(node, int(mark), kind, library, int(port), pool)

    def check(self) -> None:
        """Raise ValueError unless the store may hold this location."""
        if not SAFE_NAME.match(self.node) or not 1 <= self.port <= 65535:
            raise ValueError("a location on a device has a node and a port")
        self.parse(self.node, self.text)


class PoolEndpoint(NamedTuple):
    """Where a process of a node lets others take from its pool; see `DeviceLocation`."""

    kind: str
    library: str
    port: int
    pool: str

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.library}:{self.port}:{self.pool}"

    @classmethod
    def parse(cls, text: str) -> "PoolEndpoint":
        """The reverse of `text`. Raises ValueError for anything else."""
        match = _POOL.match(text)
        if not match or not 1 <= int(match[3]) <= 65535:
            raise ValueError("not the endpoint of a pool")
        kind, library, port, pool = match.groups()
        return cls(kind, library, int(port), pool)

    @classmethod
    def parse_all(cls, value: bytes) -> "tuple[PoolEndpoint, ...]":
        """Those that a node names, with spaces between them. What is none that we know is passed
        over: a newer version may have others."""
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
    """At most one beside each of `locations`, of the same node."""
    device: str = ""
    """On what the first publisher computed the bytes, such as cpu or H200, for people only; empty
    where nobody said."""

    def check(self) -> None:
        """Raise ValueError unless the store may hold this record."""
        check_namespace(self.namespace)
        if not self.key:
            raise ValueError("an empty key cannot be published")
        if self.kind not in ("tensor", "none"):
            raise ValueError(f"kind {self.kind!r}: 'tensor' and 'none' are allowed")
        if any(dimension < 0 for dimension in self.shape):
            raise ValueError(f"shape {self.shape}: a dimension is negative")
        if not 0 <= self.nbytes < _NBYTES_LIMIT:
            raise ValueError(f"nbytes {self.nbytes}: 0 to 2**63 - 1 are allowed")
        if self.device and not DEVICE.match(self.device):
            raise ValueError(f"device {self.device!r}: 1 to 12 printable ASCII characters")


def check_namespace(namespace: str) -> None:
    """Raise ValueError for a text that cannot be a namespace."""
    if not SAFE_NAME.match(namespace):
        raise ValueError(f"namespace {namespace!r}: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")


def check_node(node: str, boot: str) -> None:
    """Raise ValueError for what cannot be the id of a node and of its boot."""
    Location(node, boot, 1, 0).check()


def check_token(token: str) -> None:
    """Raise ValueError for a text that cannot be the token of a claim."""
    if not SAFE_NAME.match(token):
        raise ValueError("the token of a claim is 1 to 128 of A-Z a-z 0-9 . _ -")
