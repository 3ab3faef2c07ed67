"""Store URLs: parsed and checked here, and made fit to be shown.

Nothing in this module puts a password into a message, a repr or a cause.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from store.errors import StoreUrlError

ALLOWED = (
    "allowed are redis://[user[:password]@]host[:port][/database], rediss:// (TLS), "
    "valkey://, valkeys://, unix:///absolute/path[?db=N] and memory://"
)
SCHEMES = ("memory", "redis", "rediss", "unix", "valkey", "valkeys")

_TLS_SCHEMES = ("rediss", "valkeys")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_HIDDEN = "***"
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL taken apart. Exactly one of `host` and `path` is set, neither for memory://."""

    scheme: str
    host: str = ""
    port: int = 6379
    path: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_files: tuple[tuple[str, str], ...] = ()

    @property
    def tls(self) -> bool:
        return self.scheme in _TLS_SCHEMES


def parse(url: str) -> StoreUrl:
    """Take `url` apart. Raises StoreUrlError that says what is wrong and what is allowed."""
    try:
        return _parse(url)
    except StoreUrlError:
        raise
    except ValueError:
        pass
    # Outside the handler: what urlsplit raises quotes the part that it could not read, which may
    # be the password, so it must not even be the hidden context of our error.
    raise StoreUrlError(f"store URL {redact(url)!r} cannot be read; {ALLOWED}")


def _parse(url: str) -> StoreUrl:
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise StoreUrlError(f"store URL {redact(url)!r}: unknown scheme; {ALLOWED}")
    if scheme == "memory":
        if rest.strip("/"):
            raise StoreUrlError(f"store URL {redact(url)!r}: nothing follows memory://; {ALLOWED}")
        return StoreUrl(scheme)
    parts = urlsplit(f"{scheme}://{rest}")
    if parts.fragment:
        raise StoreUrlError(f"store URL {redact(url)!r}: write '#' as %23; {ALLOWED}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    database = options.pop("db", None)
    tls_files = tuple((name, options.pop(name)) for name in _TLS_OPTIONS if name in options)
    if options or (tls_files and scheme not in _TLS_SCHEMES):
        raise StoreUrlError(
            f"store URL {redact(url)!r}: unknown option; allowed are db, and with TLS "
            f"{', '.join(_TLS_OPTIONS)}"
        )
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    host, path = "", ""
    if scheme == "unix":
        path = unquote(parts.path)
        if parts.hostname or not path.startswith("/") or path == "/" or "\0" in path:
            raise StoreUrlError(
                f"store URL {redact(url)!r}: unix:// takes an absolute path, with three slashes "
                "in a row: unix:///run/valkey.sock"
            )
    else:
        host = unquote(parts.hostname or "")
        if not host:
            raise StoreUrlError(f"store URL {redact(url)!r}: the host is missing; {ALLOWED}")
        if parts.path not in ("", "/"):
            if database is not None:
                raise StoreUrlError(f"store URL {redact(url)!r}: names the database twice")
            database = parts.path.removeprefix("/")
    port = parts.port or 6379
    return StoreUrl(
        scheme, host, port, path, _database(database, url), username, password, tls_files
    )


def _database(text: str | None, url: str) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise StoreUrlError(f"store URL {redact(url)!r}: the database is a number; {ALLOWED}")
    return int(text)


def redact(url: str) -> str:
    """`url` without user, password and unknown options: fit for logs, errors and screens.

    Works on anything, also on what is no URL: then rather too much is hidden than too little.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if _ADDRESS.fullmatch(url) else _HIDDEN
    if scheme.lower() not in SCHEMES:
        return f"{scheme if scheme.isalnum() else _HIDDEN}://{_HIDDEN}"
    # What begins with '/' has no user part; '@' is then just a character of a path. A password may
    # hold unescaped '/', '?' and '#', so all before the last '@' goes.
    hidden_user = ""
    if "@" in rest and not rest.startswith("/"):
        hidden_user, rest = f"{_HIDDEN}@", rest.rpartition("@")[2]
    address, question, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    if authority and not _ADDRESS.fullmatch(authority):
        authority = _HIDDEN
    options = "&".join(_shown_option(option) for option in query.split("&")) if query else ""
    return f"{scheme}://{hidden_user}{authority}{slash}{path}{question}{options}"


def _shown_option(option: str) -> str:
    return option if option.partition("=")[0] in ("db", *_TLS_OPTIONS) else _HIDDEN
