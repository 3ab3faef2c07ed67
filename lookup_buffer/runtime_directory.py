"""The directory of this host's node: sockets, lock, log, and the data of an embedded store."""

import os
from pathlib import Path

from lookup_buffer.errors import ConfigError


def runtime_directory(named: Path | None) -> Path:
    """The one that was named, or the user's own; created with mode 0700 and checked to be ours.

    Raises:
        ConfigError: it cannot be made, belongs to somebody else, or is open to others.
    """
    path = named or _default_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except OSError as error:
        raise ConfigError(
            f"setting 'directory' is '{path}': {error.strerror}; allowed: a directory of yours"
        ) from error
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(
            f"directory {path} must belong to you with mode 0700; it belongs to uid "
            f"{state.st_uid} with mode {state.st_mode & 0o777:04o}"
        )
    return path


def _default_directory() -> Path:
    base = Path(f"/run/user/{os.getuid()}")
    if base.is_dir() and os.access(base, os.W_OK):
        return base / "lookup-buffer"
    return Path(f"/tmp/lookup-buffer-{os.getuid()}")
