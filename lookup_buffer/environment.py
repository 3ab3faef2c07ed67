"""Settings from environment variables: `LOOKUP_BUFFER_<NAME>`, files that hold them, and sizes as
`8GiB`; the installed version.

The only module that reads the environment. It must not import pydantic, so that a command with a
single query to a store starts quickly. Its callers have the list of settings and validate the
values. Any thread; starts none.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lookup_buffer.errors import ConfigError

ENVIRONMENT_PREFIX = "LOOKUP_BUFFER_"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?\s*")
_SIZE_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def settings_of_environment(names: Iterable[str]) -> dict[str, str]:
    """The values of these settings that are set; `LOOKUP_BUFFER_<NAME>_FILE` names a file with the
    value, unless the file itself is a setting. An empty variable counts as not set.

    Raises:
        ConfigError: such a file cannot be read, or is empty.
    """
    settings = {}
    names = tuple(names)
    for name in names:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if value := os.environ.get(variable):
            settings[name] = value
        elif f"{name}_file" not in names and (path := os.environ.get(variable + "_FILE")):
            settings[name] = read_secret(Path(path), f"the file of setting {name!r}")
    return settings


def misspelt_variables(names: Iterable[str]) -> dict[str, str]:
    """Unknown variables whose name nearly matches a known one, or is the first words of one, each
    with that known name. Less similar names may be of other programs, as the variables that
    Kubernetes sets for a service."""
    from difflib import get_close_matches  # takes 6 ms; imported for this check only

    known = [form for name in names for form in (name.upper(), f"{name.upper()}_FILE")]
    misspelt = {}
    for variable in sorted(os.environ):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name in (variable, *known):
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near := near or [one for one in known if one.startswith(f"{name}_")]:
            misspelt[variable] = ENVIRONMENT_PREFIX + near[0]
    return misspelt


def environment_without_token() -> dict[str, str]:
    """This process's environment, for one that must not know the nodes' token."""
    hidden = ENVIRONMENT_PREFIX + "TOKEN"
    return {name: value for name, value in os.environ.items() if name != hidden}


def environment_importing_from(folder: Path) -> dict[str, str]:
    """This process's environment with `folder` first in PYTHONPATH, for a Python process and its
    descendants."""
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_secret(path: Path, what: str) -> str:
    """The text of a file, without white space around it.

    Raises:
        ConfigError: it cannot be read, or is empty; the message calls it `what`.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # not text, or an impossible file name
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{what}, {path}, cannot be read: {why}") from error
    if not text:
        raise ConfigError(f"{what}, {path}, is empty")
    return text


def parse_bytes(value: object) -> object:
    """The bytes of `8GiB`, `512MB` or a plain number; any other value is returned unchanged, for
    the caller to refuse."""
    if isinstance(value, str) and len(value) < 32 and (match := _SIZE.fullmatch(value)):
        number, step, suffix = match.groups()
        base = 1000 if suffix in ("b", "B") and step else 1024
        return int(float(number) * base ** _SIZE_STEPS[step.lower()])
    return value


@cache
def distribution_version() -> str:
    """The version of the installed distribution that this code is. Reads a file the first time."""
    from importlib.metadata import PackageNotFoundError, version  # takes 10 ms

    try:
        return version("lookup-buffer")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0+checkout"
