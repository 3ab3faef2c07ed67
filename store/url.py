"""Store URLs: parsed, validated, and redacted for display.

Nothing in this module puts a password into a message, a repr or an exception's cause.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote

from store import url_options
from store.errors import StoreUrlError
from store.url_options import Options, read_options

Topology = Literal["standalone", "sentinel", "cluster"]

_TLS_PRODUCTS = ("rediss", "valkeys")
_PRODUCTS = ("redis", "rediss", "valkey", "valkeys")
_TOPOLOGIES: dict[str, Topology] = {
    "unix": "standalone",
    **dict.fromkeys(_PRODUCTS, "standalone"),
    **dict.fromkeys((f"{product}-sentinel" for product in _PRODUCTS), "sentinel"),
    **dict.fromkeys((f"{product}-cluster" for product in _PRODUCTS), "cluster"),
}
SCHEMES = tuple(_TOPOLOGIES)

_HOSTS = "[user[:password]@]host[:port][,host[:port]...]"
_STANDALONE_FORM = "://[user[:password]@]host[:port][/database]"
_SENTINEL_FORM = f"://{_HOSTS}/service[/database]"
_CLUSTER_FORM = f"://{_HOSTS}"
_UNIX_FORM = "unix:///absolute/path[?db=N]"
_ALL_FORMS = (
    f"redis{_STANDALONE_FORM}, redis-sentinel{_SENTINEL_FORM}, redis-cluster{_CLUSTER_FORM}, each "
    f"also with rediss (TLS), valkey or valkeys (TLS) in the place of redis, and {_UNIX_FORM}"
)

_PORT = 6379
_SENTINEL_PORT = 26379
_HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_ADDRESS = re.compile(
    r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._-]+)?\])(?::([0-9]{1,5}))?"
)
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")  # Sentinel allows no other characters either


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL. `hosts` is empty exactly if `path` is set.

    A standalone URL has one host. The hosts of the others are entry points: sentinels that know the
    master of `service`, or some of a cluster's servers. User, password and options apply to all
    servers. Sentinels have a user and a password of their own, and share the options.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    database: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the TLS context, by redis-py's names."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of redis-py's connections, by name."""
    client_name: str = url_options.CLIENT_NAME
    """How the names of connections begin."""
    connections_max: int = url_options.CONNECTIONS_MAX
    """Connections to one server; a call that needs another one fails."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @property
    def topology(self) -> Topology:
        return _TOPOLOGIES[self.scheme]

    @property
    def tls(self) -> bool:
        return self.scheme.partition("-")[0] in _TLS_PRODUCTS

    @property
    def place(self) -> str:
        """What names the store: its servers and database. Users and options may differ between
        those who use it, as may TLS: a port has it or not."""
        if self.path:
            return f"unix://{self.path}?db={self.database}"
        scheme = f"redis-{self.topology}".removesuffix("-standalone")
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        names = [self.service, str(self.database)] if self.service else [str(self.database)]
        return f"{scheme}://{hosts}/{'/'.join(names)}"

    def with_passwords(
        self,
        password: str | None,
        sentinel_password: str | None,
        *,
        provided: bool = False,
        sentinel_provided: bool = False,
    ) -> "StoreUrl":
        """Return a copy with the given passwords instead of its own.

        `provided` and `sentinel_provided`: each connection gets the password otherwise.

        Raises:
            StoreUrlError: a user without a password; servers would use the default user.
        """
        complete = replace(
            self,
            password=password or self.password,
            sentinel_password=sentinel_password or self.sentinel_password,
        )
        for user, has_secret, name in (
            (complete.username, provided or complete.password, "store_password"),
            (
                complete.sentinel_username,
                sentinel_provided or complete.sentinel_password,
                "store_sentinel_password",
            ),
        ):
            if user is not None and not has_secret:
                raise StoreUrlError(  # the user may be a misplaced password, so it is not shown
                    f"the store URL names a user and no password; set {name!r} or '{name}_file' "
                    "(a password without a user is written redis://:PASSWORD@host)"
                )
        return complete

    @property
    def with_secret(self) -> bool:
        """Whether it has a password, and so must not be written where others can read it."""
        return self.password is not None or self.sentinel_password is not None


def parse(url: str) -> StoreUrl:
    """Parse `url`. Raises StoreUrlError, which says what is wrong and what is allowed."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    topology = _TOPOLOGIES.get(scheme)
    if not separator or topology is None:
        raise _refusal(url, "unknown scheme")
    if "#" in rest:
        raise _refusal(url, "write '#' as %23")
    address, _, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    user, _, hosts = authority.rpartition("@")
    if topology != "standalone" and "@" in user:
        raise _refusal(url, "write user and password once, before the first host; write @ as %40")
    username, _, password = user.partition(":")
    read_hosts = () if scheme == "unix" else _read_hosts(url, topology, hosts)
    socket_path = _socket_path(url, hosts, slash + path) if scheme == "unix" else ""
    options = _read_options(url, scheme, query)
    values = options.values
    service, database = _service_and_database(url, scheme, path, values)
    return StoreUrl(
        scheme,
        hosts=read_hosts,
        path=socket_path,
        database=database,
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls_options=options.of(url_options.TLS),
        options=options.of(url_options.CONNECTION) | options.of(url_options.TCP),
        client_name=values.get("client_name", url_options.CLIENT_NAME),
        connections_max=values.get("max_connections", url_options.CONNECTIONS_MAX),
        sentinel_username=values.get("sentinel_username") or None,
        sentinel_password=values.get("sentinel_password") or None,
    )


def _read_options(url: str, scheme: str, query: str) -> Options:
    """The options of `url`. Each must be allowed by the scheme, and given once."""
    topology = _TOPOLOGIES[scheme]
    groups = [url_options.OWN, url_options.CONNECTION]
    if topology != "cluster":
        groups.insert(0, url_options.DATABASE)
    if topology == "sentinel":
        groups.append(url_options.SENTINEL)
    if scheme != "unix":
        groups.append(url_options.TCP)
    if scheme.partition("-")[0] in _TLS_PRODUCTS:
        groups.append(url_options.TLS)
    options = read_options(query, *groups)
    if options.fault:
        raise StoreUrlError(f"store URL {redact(url)!r}: {options.fault}")
    return options


def _service_and_database(
    url: str, scheme: str, path: str, options: dict[str, str]
) -> tuple[str, int]:
    topology = _TOPOLOGIES[scheme]
    service, database = "", "" if scheme == "unix" else path
    if topology == "sentinel":
        service, _, database = path.partition("/")
        if not _SERVICE.fullmatch(service):
            raise _refusal(url, "the service must be 1 to 128 characters of A-Za-z0-9._-")
    if topology == "cluster" and database:
        raise _refusal(url, "a cluster has only database 0; leave the database out")
    if "db" in options:
        if database:
            raise _refusal(url, "the database is given twice; write it as a path or as db=N")
        database = options["db"]
    elif not database:
        return service, 0
    if not (database.isascii() and database.isdigit() and len(database) <= 6):
        raise _refusal(url, "the database must be a number of at most six digits")
    return service, int(database)


def _read_hosts(url: str, topology: Topology, text: str) -> tuple[tuple[str, int], ...]:
    if not text:
        raise _refusal(url, "the host is missing")
    hosts = []
    for address in text.split(","):
        match = _ADDRESS.fullmatch(address)
        default = _SENTINEL_PORT if topology == "sentinel" else _PORT
        port = int(match[2] or default) if match else 0
        if not match or not 1 <= port <= 65535:
            raise _refusal(url, "a host or a port cannot be read")
        hosts.append((_host_of(url, unquote(match[1].strip("[]")).lower()), port))
    if len(hosts) > 1 and topology == "standalone":
        raise _refusal(url, "several hosts are for redis-sentinel:// and redis-cluster:// only")
    return tuple(hosts)


def _host_of(url: str, name: str) -> str:
    """At ::1, the other address of localhost, another user may listen, and would get the password.
    By TLS the server proves who it is, by that name."""
    is_tls = url.partition("://")[0].partition("-")[0].lower() in _TLS_PRODUCTS
    return "127.0.0.1" if name == "localhost" and not is_tls else name


def _socket_path(url: str, host: str, path: str) -> str:
    path = unquote(path)
    if host or not path.startswith("/") or path == "/" or "\0" in path:
        raise _refusal(
            url,
            "unix:// takes an absolute path, with three slashes in a row: unix:///run/valkey.sock",
        )
    return path


def _refusal(url: str, why: str) -> StoreUrlError:
    scheme = url.partition("://")[0].lower()
    forms = {"standalone": _STANDALONE_FORM, "sentinel": _SENTINEL_FORM, "cluster": _CLUSTER_FORM}
    if scheme == "unix":
        allowed = _UNIX_FORM
    elif form := forms.get(_TOPOLOGIES.get(scheme, "")):
        allowed = scheme + form
    else:
        allowed = _ALL_FORMS
    return StoreUrlError(f"store URL {redact(url)!r}: {why}; allowed: {allowed}")


def redact(url: str) -> str:
    """`url` without user, password and unknown options: safe for logs, errors and screens.

    Accepts any text, also one that is no URL. In doubt it hides more: all but the scheme if that is
    not one of Redis'.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if _ADDRESS.fullmatch(url) else _HIDDEN
    if scheme.lower() not in SCHEMES:
        return f"{scheme if _SCHEME.fullmatch(scheme) else _HIDDEN}://{_HIDDEN}"
    # A socket's path may contain an '@'. Elsewhere the last '@' ends the user part, even if slashes
    # come before it: they may be part of a password, or a typing error.
    hidden_user = ""
    if "@" in rest and not (scheme.lower() == "unix" and rest.startswith("/")):
        user, _, rest = rest.rpartition("@")
        if "?" in user:  # this '@' may be part of an option, and a secret may follow it
            return f"{scheme}://{_HIDDEN}"
        hidden_user = f"{_HIDDEN}@"
    address, question, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    hosts = authority.split(",") if authority or scheme.lower() != "unix" else []
    if rest and not all(map(_ADDRESS.fullmatch, hosts)):
        return f"{scheme}://{hidden_user}{_HIDDEN}"  # may be part of a password, like what follows
    options = "&".join(_shown_option(option) for option in query.split("&")) if query else ""
    return f"{scheme}://{hidden_user}{authority}{slash}{path}{question}{options}"


def _shown_option(option: str) -> str:
    return option if option.partition("=")[0] in url_options.SHOWN else _HIDDEN
