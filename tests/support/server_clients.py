"""What the clients of a real server do: their connections, and all commands that they send.

`place` is as for `RespConnection`: the path of a unix socket, or a port of this machine. `place_of`
is that of a server's URL.
"""

import re
import secrets
from collections.abc import Sequence
from urllib.parse import unquote

from resp import RespConnection

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')

Place = str | int
Commands = Sequence[Sequence[str]]
"""The words of each command."""


def place_of(url: str) -> Place:
    """The place of the server at a URL with a unix socket, or with a port and no more."""
    rest = url.partition("://")[2]
    return unquote(rest) if url.startswith("unix://") else int(rest.rpartition(":")[2])


class Monitor:
    """Records all commands that servers execute."""

    def __init__(self, *places: Place) -> None:
        self._watched = [(place, RespConnection(place)) for place in places]
        for _, connection in self._watched:
            connection("MONITOR")

    def commands(self) -> list[list[str]]:
        """The commands of clients since the last call; not those of scripts."""
        found = []
        for place, connection in self._watched:
            mark = secrets.token_hex(8)
            with RespConnection(place) as other:
                other("ECHO", mark)
            while mark not in (line := connection.read().decode("utf-8", "replace")):
                if " lua] " not in line:
                    found.append(_WORD.findall(line))
        return found

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        for _place, connection in self._watched:
            connection.close()


def records_read(commands: Commands) -> list[str]:
    """The names of the records that were read, one for each time."""
    return [w[1] for w in commands if w[0].upper() == "HGETALL" and w[1].startswith("lb:rec:")]


def records_in_scripts(commands: Commands) -> list[str]:
    """The names of the records that scripts published or withdrew, one for each time."""
    scripts = [words for words in commands if words[0].upper() in ("EVAL", "EVALSHA")]
    return [words[3] for words in scripts if words[3].startswith("lb:rec:")]


def clients(place: Place) -> list[dict[str, str]]:
    """The fields of CLIENT LIST for each client; not for this question's own, nor for monitors,
    replicas and other servers."""
    with RespConnection(place) as connection:
        own = str(connection("CLIENT", "ID"))
        lines = connection("CLIENT", "LIST", "TYPE", "NORMAL").decode().splitlines()
    found = [dict(field.partition("=")[::2] for field in line.split()) for line in lines]
    return [fields for fields in found if "O" not in fields["flags"] and fields["id"] != own]


def cut_all(place: Place) -> int:
    """End the connections of all these clients, as a server does after its idle time-out; how many
    there were."""
    found = clients(place)
    with RespConnection(place) as connection:
        for fields in found:
            connection("CLIENT", "KILL", "ID", fields["id"], "SKIPME", "yes")
    return len(found)


def refusals(place: Place, code: str) -> int:
    """How many commands the server has refused with this code."""
    with RespConnection(place) as connection:
        info = connection("INFO", "errorstats").decode()
    return int((info.partition(f"errorstat_{code}:count=")[2].split() or ["0"])[0])
