"""A stand-in for redis-cli, for the recipes of docs/redis-keys.md on machines without one.

`python redis_cli.py SOCKET [--scan --pattern PATTERN | WORD ...]` prints what redis-cli prints into
a pipe: each string or number of the reply on a line of its own.
"""

import sys
from collections.abc import Iterator
from typing import Any

from resp import RespConnection


def lines(reply: Any) -> Iterator[str]:
    if isinstance(reply, list):
        for part in reply:
            yield from lines(part)
    else:
        yield "" if reply is None else reply.decode() if isinstance(reply, bytes) else str(reply)


def scan(connection: RespConnection, pattern: str) -> Iterator[str]:
    cursor = b"0"
    while True:
        cursor, names = connection("SCAN", cursor, "MATCH", pattern)
        yield from lines(names)
        if cursor == b"0":
            return


def main() -> None:
    path, *words = sys.argv[1:]
    with RespConnection(path) as connection:
        if words[0] == "--scan":
            found = scan(connection, words[words.index("--pattern") + 1])
        else:
            found = lines(connection(*words))
        for line in found:
            print(line)


if __name__ == "__main__":
    main()
