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
        ConfigError: such a file cannot be read.
    """
    settings = {}
    for name in names:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if value := os.environ.get(variable):
            settings[name] = value
        elif path := os.environ.get(variable + "_FILE"):
            settings[name] = _read(name, Path(path))
    return settings


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"the file {path} of setting {name!r} cannot be read: {why}") from error
