"""Access to the metadata store: URL, passwords, timeout; the node's runtime directory, and the
token of nodes to which none is given.

`StoreAccess` is the store part of `BufferConfig`. A command that only queries the store needs no
more. Such a command takes 0.2 s, as long as an import of pydantic would, so this module must not
import it. The runtime directory holds the sockets, lock and log of this host's node, and the data
of an embedded store. Any thread; starts none.
"""

import errno
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from lookup_buffer.environment import read_secret, settings_of_environment
from lookup_buffer.errors import ConfigError
from store import BlockingStore, MetadataStore, StoreUrlError, open_async_store, redact
from store.schemes import is_foreign, unknown_scheme
from store.url import parse


def absolute_path(value: str | Path) -> Path:
    """The path of a setting, as a node can use it, which runs in /. `~` is the user's home.

    Raises:
        ValueError: states what is allowed.
    """
    if value == "":
        raise ValueError("a path, which must not be empty")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:
        raise ValueError("a path; this user has no home directory") from None


def runtime_directory(named: Path | None, *, make: bool = True) -> Path:
    """The directory `named`, or the user's default; its owner and mode are checked. If there is
    none, it is created with mode 0700, or, without `make`, only said where it would be.

    Raises:
        ConfigError: it cannot be created, belongs to another user, is open to others, or is a
            symbolic link: another user may have placed it, to have files written where it leads.
    """
    path = named or _default_directory()
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not os.path.lexists(path):
            _check_creatable(path)
            return path
        state = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"setting 'directory' is '{path}': {error.strerror}; allowed: a directory that you own "
            "or can create"
        ) from error
    if stat.S_ISLNK(state.st_mode):
        raise ConfigError(
            f"directory {path} is a symbolic link, which is not followed; set 'directory' to the "
            "directory itself"
        )
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(
            f"directory {path} must belong to you with mode 0700; it belongs to uid "
            f"{state.st_uid} with mode {state.st_mode & 0o777:04o}"
        )
    return path


def _check_creatable(path: Path) -> None:
    """Raises OSError: the user may not create it."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def user_token() -> str:
    """The token of all nodes of this user on this host to which none is given. The first who asks
    makes it, in the user's default directory, whatever the `directory` of his node: nodes of one
    user find each other's.

    Raises:
        ConfigError: it cannot be made or read.
    """
    with _told_of_token():
        path = runtime_directory(None) / "token"
        if not path.exists():
            _make_secret(path)
        return read_secret(path, _USER_TOKEN)


def known_user_token() -> str | None:
    """`user_token`, if it has been made."""
    with _told_of_token():
        path = runtime_directory(None, make=False) / "token"
        return read_secret(path, _USER_TOKEN) if path.exists() else None


_USER_TOKEN: Final = "the token of this user's nodes"


@contextmanager
def _told_of_token() -> Iterator[None]:
    try:
        yield
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"no 'token_file' is set, and this user's nodes cannot share a token: {error}"
        ) from error


def _make_secret(path: Path) -> None:
    """Write a random word to a new file of mode 0600. Of several processes at once one succeeds,
    and no other reads a part of it."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _default_directory() -> Path:
    base = Path(f"/run/user/{os.getuid()}")
    if base.is_dir() and os.access(base, os.W_OK):
        return base / "lookup-buffer"
    return Path(f"/tmp/lookup-buffer-{os.getuid()}")


EMBEDDED: Final = "embedded"
TIMEOUT_SECONDS: Final = 0.5
TIMEOUT_SECONDS_MAX: Final = 30.0
PASSWORDS: Final = (
    ("store_password", "store_password_file", "store_credential_provider"),
    ("store_sentinel_password", "store_sentinel_password_file"),
)
"""Ways to give the same password, of which one may be used."""
TOKENS: Final = (("token", "token_file"), ("http_token", "http_token_file"))
"""The same, for a node's tokens."""
_IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SETTINGS: Final = (
    "store_url", *PASSWORDS[0], *PASSWORDS[1], "store_timeout_seconds", "directory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Settings for the store. `url` is as set; `directory` is the node's runtime directory, in
    which the embedded server listens if `url` is `embedded`.

    The files of passwords are read, and the credential provider is asked, at each connect.
    """

    url: str = field(default=EMBEDDED, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    timeout_seconds: float = TIMEOUT_SECONDS
    directory: Path | None = None
    password_file: Path | None = None
    sentinel_password_file: Path | None = None
    credential_provider: str | None = None
    """Import path, `package.module:attribute`."""

    @classmethod
    def from_environment(cls, **overrides: str | Path | None) -> "StoreAccess":
        """Settings from the environment, under the names of `BufferConfig`; `overrides` that are
        not None win.

        Raises:
            ConfigError: a setting is wrong.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        settings = override(settings_of_environment(_SETTINGS), given)

        def text(name: str) -> str | None:
            return str(settings[name]) if name in settings else None

        def path(name: str) -> Path | None:
            return _checked_path(name, settings[name]) if name in settings else None

        access = cls(
            _checked_url(text("store_url") or EMBEDDED),
            text("store_password"),
            text("store_sentinel_password"),
            _checked_seconds(settings.get("store_timeout_seconds", TIMEOUT_SECONDS)),
            path("directory"),
            path("store_password_file"),
            path("store_sentinel_password_file"),
            text("store_credential_provider"),
        )
        access.check_passwords()
        return access

    def check_passwords(self) -> None:
        """
        Raises:
            StoreUrlError: the URL names a user that has no password. Only a package knows the users
                in its URLs.
            ConfigError: a password is given in two ways, its file cannot be read, or the provider's
                import path is none.
        """
        for settings, values in (
            (PASSWORDS[0], (self.password, self.password_file, self.credential_provider)),
            (PASSWORDS[1], (self.sentinel_password, self.sentinel_password_file)),
        ):
            pairs = zip(settings, values, strict=True)
            given = [repr(name) for name, value in pairs if value is not None]
            if len(given) > 1:
                raise ConfigError(f"set only one of {' and '.join(given)}")
        provider = self.credential_provider
        if provider is not None and not _IMPORT_PATH.fullmatch(provider):
            raise ConfigError(
                f"setting 'store_credential_provider' is {provider!r}; allowed: an import path, "
                "package.module:attribute"
            )
        for name, file in (
            ("store_password_file", self.password_file),
            ("store_sentinel_password_file", self.sentinel_password_file),
        ):
            if file is not None:
                read_secret(file, f"the file of setting {name!r}")
        if self.url != EMBEDDED and not is_foreign(self.url):
            parse(self.url).with_passwords(
                self.password,
                self.sentinel_password,
                provided=bool(self.password_file or self.credential_provider),
                sentinel_provided=self.sentinel_password_file is not None,
            )

    def actual_url(self) -> str:
        """The URL to connect to. Raises ConfigError: see `runtime_directory`, for `embedded`."""
        if self.url == EMBEDDED:
            return embedded_url(runtime_directory(self.directory, make=False))
        return self.url

    def check_files(self) -> None:
        """Raises ConfigError: a TLS option of the URL or the credential provider cannot be used."""
        self._provider()
        if self.url == EMBEDDED or is_foreign(self.url):
            return
        options = parse(self.url).tls_options
        if not options:
            return
        from store.tls import TlsOptionError, tls_context  # imports OpenSSL, needed for TLS only

        try:
            tls_context(options)
        except TlsOptionError as error:
            raise ConfigError(f"setting 'store_url': {error}") from None

    def open(self, url: str, seconds: float, *, name: str) -> BlockingStore:
        """The store at `url`, for commands; `seconds` bounds each call."""
        return BlockingStore(self.open_async(url, seconds, name=name))

    def open_async(self, url: str, seconds: float, *, name: str) -> MetadataStore:
        """The store at `url`, with these passwords. `name` is part of its connections' names.

        Raises:
            ConfigError: the credential provider cannot be imported.
        """
        return open_async_store(
            url,
            call_timeout_seconds=seconds,
            password=self.password,
            sentinel_password=self.sentinel_password,
            password_file=self.password_file,
            sentinel_password_file=self.sentinel_password_file,
            credential_provider=self._provider(),
            name=name,
        )

    def _provider(self) -> Any:
        """The credential provider, or None."""
        if self.credential_provider is None:
            return None
        from store.credentials import load_provider  # imports redis-py

        try:
            return load_provider(self.credential_provider)
        except StoreUrlError as error:
            raise ConfigError(f"setting 'store_credential_provider': {error}") from error


def override(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with those that are `given`. A secret given in one way replaces one given in
    another way."""
    ways = (*PASSWORDS, *TOKENS)
    replaced = {name for names in ways if given.keys() & set(names) for name in names}
    return {name: settings[name] for name in settings if name not in replaced} | dict(given)


def embedded_url(directory: Path) -> str:
    """The URL of the embedded server of the node in `directory`."""
    return f"unix://{quote(str(directory))}/valkey/server.sock"


def check_store_url(value: str) -> str:
    """`value`, if it is a valid store URL. Raises ValueError, which states the form allowed.

    Of a package's URL the scheme is checked; the rest when the package opens the store.
    """
    if value == EMBEDDED:
        return value
    if allowed := unknown_scheme(value):
        raise ValueError(f"'embedded' or {allowed}")
    if not is_foreign(value):
        parse(value)
    return value


def _checked_path(name: str, value: str | Path) -> Path:
    try:
        return absolute_path(value)
    except ValueError as error:
        raise ConfigError(f"setting {name!r} is {str(value)!r}; allowed: {error}") from None


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
