"""The descriptions of namespaces: what an engine says that makes up its namespace, for people.

They are not read by any node: the CLI and the page show them. Redis keeps one for a week, and a
client may name any namespace, so what is published of new ones is bounded.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from lookup_buffer.node.storage import FailureLog
from store import MetadataStore, StoreCorrupt

WRITE_SECONDS: Final = 0.5
"""Bound on what they add to one round of the periodic tasks."""
DESCRIPTIONS_MAX: Final = 256
"""So many are kept, to be published again when Redis lost its data: the last ones."""
BYTES_MAX: Final = 64 << 10
"""Of one description; larger ones are not published."""
KEY_BYTES: Final = 256
"""What a description of nothing counts for: its key takes memory of Redis, too."""
NEW_MAX: Final = 1 << 20
"""Bytes of new descriptions that are published at once: hundreds, of about 2,000 each."""
NEW_PER_SECOND: Final = 100
"""And with time: this makes 60 MB in the week that they stay. Others are not published."""


class Descriptions:
    def __init__(self, loop: asyncio.AbstractEventLoop, failures: FailureLog) -> None:
        self._loop = loop
        self._failures = failures
        self._parts: dict[str, Mapping[str, str]] = {}
        """By namespace, the last one at the end."""
        self._unwritten: dict[str, None] = {}
        self._new = 0.0
        """Bytes of new descriptions, less those that time allows."""
        self._counted_at = loop.time()

    def add(self, namespace: str, parts: Mapping[str, str]) -> bool:
        """Returns whether there is something new to be written."""
        size = sum(len(text.encode(errors="replace")) for pair in parts.items() for text in pair)
        is_new = self._parts.get(namespace) != parts
        if size > BYTES_MAX or (is_new and not self._may_add(KEY_BYTES + size)):
            return False
        self._parts.pop(namespace, None)
        self._parts[namespace] = parts
        if len(self._parts) > DESCRIPTIONS_MAX:
            oldest = next(iter(self._parts))
            del self._parts[oldest]
            self._unwritten.pop(oldest, None)
        if is_new:
            self._unwritten[namespace] = None
        return is_new

    def _may_add(self, size: int) -> bool:
        now = self._loop.time()
        allowed = (now - self._counted_at) * NEW_PER_SECOND
        self._new, self._counted_at = max(0.0, self._new - allowed), now
        if self._new + size > NEW_MAX:
            return False
        self._new += size
        return True

    def repeat(self) -> None:
        """Write all of them again."""
        self._unwritten |= dict.fromkeys(self._parts)

    async def write(self, store: MetadataStore) -> None:
        """Raises StoreError: what was not written is written by the next call."""
        until = self._loop.time() + WRITE_SECONDS
        for namespace in list(self._unwritten):
            if self._loop.time() >= until:
                return  # the others with the next beat, which must not be late
            self._unwritten.pop(namespace, None)  # `add` may add it again meanwhile
            parts = self._parts.get(namespace)
            if parts is None:
                continue  # there are too many newer ones
            try:
                await store.describe_namespace(namespace, parts)
            except StoreCorrupt as error:  # another program's data; it is not overwritten
                self._failures.log(f"namespace {namespace} cannot be described", error)
            except Exception:
                self._unwritten[namespace] = None  # the last one: those of other servers first
                raise
