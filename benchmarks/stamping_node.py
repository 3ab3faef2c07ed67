"""A node that logs when it begins to publish each key, for the benchmarks of wake-ups.

Otherwise it is the node that a client would start. It reads its settings as JSON from standard
input. For each publication it appends a line `<key> <monotonic nanoseconds>` to the given file.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lookup_buffer.config import BufferConfig
from lookup_buffer.node.main import serve
from store import Publication, Publishing
from store.redis_store import RedisStore


def main() -> None:
    publish = RedisStore.publish_many
    with Path(sys.argv[1]).open("a", buffering=1) as log:

        async def stamped(self: RedisStore, publishings: Sequence[Publishing]) -> list[Publication]:
            begun = time.monotonic_ns()
            answers = await publish(self, publishings)
            log.writelines(f"{one.record.key} {begun}\n" for one in publishings)
            return answers

        RedisStore.publish_many = stamped  # type: ignore[method-assign]
        serve(BufferConfig.of(json.load(sys.stdin)), ends_when_idle=True)
