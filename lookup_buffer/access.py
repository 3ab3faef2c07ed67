"""Access to the metadata store: URL, passwords, timeout; and the node's runtime directory.

`StoreAccess` is the store part of `BufferConfig`. A command that only queries the store needs no
more. Such a command takes 0.2 s, as long as an import of pydantic would, so this module must not
import it. The runtime directory holds the sockets, lock and log of this host's node, and the data
of an embedded store. Any thread; starts none.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from lookup_buffer.environment import settings_of_environment
from lookup_buffer.errors import ConfigError
from store import MetadataStore, StoreUrlError, open_store, redact
from store.url import SCHEMES, parse


def runtime_directory(named: Path | None) -> Path:
    """The directory `named`, or the user's default; created with mode 0700, its owner and mode
    checked.

    Raises:
        ConfigError: it cannot be created, belongs to another user, or is open to others.
    """
    path = named or _default_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except OSError as error:
        raise ConfigError(
            f"setting 'directory' is '{path}': {error.strerror}; allowed: a directory that you own "
            "or can create"
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


EMBEDDED: Final = "embedded"
TIMEOUT_SECONDS: Final = 0.25
TIMEOUT_SECONDS_MAX: Final = 30.0
_SETTINGS: Final = (
    "store_url", "store_password", "store_sentinel_password", "store_timeout_seconds", "directory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Settings for the store. `url` is as set; `directory` is the node's runtime directory, in
    which the embedded server listens if `url` is `embedded`."""

    url: str = EMBEDDED
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    timeout_seconds: float = TIMEOUT_SECONDS
    directory: Path | None = None

    @classmethod
    def from_environment(cls, **overrides: str | Path | None) -> "StoreAccess":
        """Settings from the environment, under the names of `BufferConfig`; `overrides` that are
        not None win.

        Raises:
            ConfigError: a setting is wrong.
        """
        settings: dict[str, str | Path] = dict(settings_of_environment(_SETTINGS))
        settings |= {name: value for name, value in overrides.items() if value is not None}
        directory = settings.get("directory")
        password = settings.get("store_password")
        sentinel_password = settings.get("store_sentinel_password")
        access = cls(
            _checked_url(str(settings.get("store_url", EMBEDDED))),
            None if password is None else str(password),
            None if sentinel_password is None else str(sentinel_password),
            _checked_seconds(settings.get("store_timeout_seconds", TIMEOUT_SECONDS)),
            Path(directory) if directory else None,
        )
        access.check_passwords()
        return access

    def check_passwords(self) -> None:
        """Raises StoreUrlError: the URL names a user that has no password."""
        if self.url != EMBEDDED:
            parse(self.url).with_passwords(self.password, self.sentinel_password)

    def actual_url(self) -> str:
        """The URL to connect to. Raises ConfigError: see `runtime_directory`, for `embedded`."""
        if self.url == EMBEDDED:
            return embedded_url(runtime_directory(self.directory))
        return self.url

    def check_files(self) -> None:
        """Raises ConfigError: a TLS file named in the URL cannot be used."""
        if self.url == EMBEDDED or not (files := dict(parse(self.url).tls_files)):
            return
        from store.tls import TlsFileError, tls_context  # imports OpenSSL, needed for TLS only

        try:
            tls_context(files)
        except TlsFileError as error:
            raise ConfigError(f"setting 'store_url': {error}") from None

    def open(self, url: str, seconds: float) -> MetadataStore:
        """The store at `url`, with these passwords; `seconds` bounds each call and connect."""
        return open_store(
            url,
            call_timeout_seconds=seconds,
            connect_timeout_seconds=seconds,
            password=self.password,
            sentinel_password=self.sentinel_password,
        )


def embedded_url(directory: Path) -> str:
    """The URL of the embedded server of the node in `directory`."""
    return f"unix://{quote(str(directory))}/valkey/server.sock"


def check_store_url(value: str) -> str:
    """`value`, if it is a valid store URL. Raises ValueError, which states the form allowed."""
    if value == EMBEDDED:
        return value
    if value.partition("://")[0].lower() not in SCHEMES:
        raise ValueError(
            "'embedded' or a URL that begins with one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    parse(value)
    return value


def _checked_url(value: str) -> str:
    try:
        return check_store_url(value)
    except StoreUrlError:
        raise
    except ValueError as error:
        raise ConfigError(f"setting 'store_url' is {redact(value)!r}; allowed: {error}") from None


def _checked_seconds(value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIMEOUT_SECONDS_MAX:
        raise ConfigError(
            f"setting 'store_timeout_seconds' is {value!r}; allowed: a number above 0, at most "
            f"{TIMEOUT_SECONDS_MAX:g}"
        )
    return seconds
