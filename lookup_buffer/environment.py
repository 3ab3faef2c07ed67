"""Settings that stand in the environment: `LOOKUP_BUFFER_<NAME>`, and files that hold them.

The only module that reads the environment. Needs no pydantic, so that a command which asks a store
one question need not wait for it.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from lookup_buffer.errors import ConfigError

ENVIRONMENT_PREFIX = "LOOKUP_BUFFER_"


def settings_of_environment(names: Iterable[str]) -> dict[str, str]:
    """What is said of these settings; `LOOKUP_BUFFER_<NAME>_FILE` names a file that says it. A
    variable that is empty says nothing.

    Raises:
        ConfigError: such a file cannot be read, or is empty.
    """
    settings = {}
    for name in names:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if value := os.environ.get(variable):
            settings[name] = value
        elif path := os.environ.get(variable + "_FILE"):
            settings[name] = read_secret(Path(path), f"the file of setting {name!r}")
    return settings


def misspelt_variables(names: Iterable[str]) -> dict[str, str]:
    """Variables that say nothing because they are nearly the name of one that would, and that one.
    What is less like one may be somebody else's, as those that Kubernetes sets for a service."""
    from difflib import get_close_matches  # 6 ms that only who looks for mistakes should pay

    known = [form for name in names for form in (name.upper(), f"{name.upper()}_FILE")]
    misspelt = {}
    for variable in sorted(os.environ):
        said = variable.removeprefix(ENVIRONMENT_PREFIX)
        if said in (variable, *known):
            continue
        if near := get_close_matches(said, known, n=1, cutoff=0.8):
            misspelt[variable] = ENVIRONMENT_PREFIX + near[0]
    return misspelt


def environment_importing_from(folder: Path) -> dict[str, str]:
    """This process's environment with `folder` first in PYTHONPATH, for a Python process and all
    that it starts."""
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read_secret(path: Path, what: str) -> str:
    """The text of a file, without white space around it.

    Raises:
        ConfigError: it cannot be read, or nothing stands there; `what` is how the message calls it.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # not text, or a name that no file can have
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{what}, {path}, cannot be read: {why}") from error
    if not text:
        raise ConfigError(f"{what}, {path}, is empty")
    return text
