"""`BufferConfig`: the settings of a node and of its clients, validated on construction.

This module has the settings' names, defaults and bounds, and the rule that a listener beyond
loopback needs a token. Secrets are `SecretStr`: no repr, error or log line shows them. Immutable
data; any thread.
"""

import hashlib
import ipaddress
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from lookup_buffer.access import (
    EMBEDDED,
    TIMEOUT_SECONDS,
    TIMEOUT_SECONDS_MAX,
    TOKENS,
    StoreAccess,
    absolute_path,
    check_store_url,
    known_user_token,
    override,
    runtime_directory,
    user_token,
)
from lookup_buffer.environment import parse_bytes, read_secret, settings_of_environment
from lookup_buffer.errors import ConfigError
from store import redact
from store.schemes import is_foreign
from store.url import SCHEMES, parse

GIB = 1 << 30
YEAR_SECONDS = 366 * 86_400.0
TLS_FILES = ("tls_certificate_file", "tls_key_file", "tls_authority_file")
SECRETS = ("token", "http_token", "store_password", "store_sentinel_password")
WILDCARDS = ("0.0.0.0", "::")
TOKEN_CHARACTERS_MIN = 16
_HEADER_TOKEN = re.compile(r"[!-~]{1,256}")
_PLACEHOLDER = re.compile(
    r"(replace|change)[-_ ]?(me|this)|placeholder|your[-_ ]?(token|secret|password)|example|^<.*>$",
    re.IGNORECASE,
)


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def _bytes(value: object) -> object:
    parsed = parse_bytes(value)
    if isinstance(parsed, str):
        raise ValueError("a number of bytes, or a size as '8GiB'")  # noqa: TRY004 -- pydantic's way
    return parsed


Bytes = Annotated[int, BeforeValidator(_bytes)]


class TlsFiles(NamedTuple):
    """What a node proves itself with, and by whom others must be certified; all in PEM."""

    certificate: Path
    key: Path
    authority: Path


class BufferConfig(BaseModel):
    """Settings of a node and of the clients that start it. Immutable; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store_url: str = EMBEDDED
    """Metadata store: `embedded` (a Valkey on this host), or a Redis or Valkey URL."""
    store_password: SecretStr | None = None
    """Password for the store, kept out of the URL."""
    store_password_file: Path | None = None
    """File that holds this password. It is read at each connect, so the password may change."""
    store_sentinel_password: SecretStr | None = None
    """Password for the store's sentinels, if they have a separate one."""
    store_sentinel_password_file: Path | None = None
    """File that holds this password. It is read at each connect."""
    store_credential_provider: str | None = None
    """Import path, `package.module:attribute`, of a `redis.credentials.CredentialProvider` that the
    node asks for user and password at each connect, or of what makes one without arguments."""
    store_timeout_seconds: float = Field(default=TIMEOUT_SECONDS, gt=0, le=TIMEOUT_SECONDS_MAX)
    """Bound on one call to the store; connecting has this time, or 1.5 s."""
    store_opentelemetry: bool = False
    """Record redis-py's OpenTelemetry metrics of the node's connections to the store. Where they go
    is said by OpenTelemetry's own variables, as OTEL_EXPORTER_OTLP_ENDPOINT."""
    mirror: bool | None = None
    """Keep a mirror of the store's records, updated by its push messages; off: query it always.
    None: on, except with `read_only`, whose user of the store may not track keys."""
    capacity_bytes: Bytes = Field(default=4 * GIB, ge=1 << 20)
    """Size of the arena: a number of bytes, or a size like `8GiB`."""
    node_socket: Path | None = None
    """Unix socket of a running node; none: find this host's node, or start it."""
    node_uid: int | None = Field(default=None, ge=0)
    """User id of that node, if it is neither this process' own nor root: any other is refused."""
    directory: Path | None = None
    """Runtime directory (sockets, lock, log); none: one per user."""
    node_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,48}$")
    """Name of the node in Redis; none: the host's name and a random suffix."""
    listen: str = "tcp://127.0.0.1:0"
    """Address on which the node serves other nodes; port 0 picks a free one. With `tls://host:port`
    all its connections with other nodes are mutual TLS, and the `tls_` files are needed."""
    advertise: str | None = None
    """Address that the node publishes to other nodes; none: the address of `listen`."""
    token: SecretStr | None = None
    """Secret that the nodes of a fleet share; needed to listen beyond loopback without TLS. Without
    it nodes of one user on one host share one that they make, see `user_token`."""
    token_file: Path | None = None
    """File with that secret, which the node reads at its start; its clients never do."""
    tls_certificate_file: Path | None = None
    """Certificate of this node in PEM, with those between it and the authority's. One of its DNS or
    URI names is `node_id`. This file and the next two are read again when they change."""
    tls_key_file: Path | None = None
    """Private key of this certificate in PEM, without a passphrase."""
    tls_authority_file: Path | None = None
    """Certificates in PEM of the authorities that sign for nodes."""
    read_only: bool = False
    """Whether the node and its clients only read. The node stores, takes and claims nothing, and
    writes nothing to the store. With TLS its certificate has to say so, which other nodes check."""
    http_listen: str | None = None
    """Address of `/metrics` and `/healthz`, as `http://127.0.0.1:7731`; none: not served."""
    http_token: SecretStr | None = None
    """Secret that readers of `/metrics` send as `Authorization: Bearer`; needed to serve it beyond
    loopback. Use another secret than `token`, which gives access to tensors."""
    http_token_file: Path | None = None
    """File with that secret, which the node reads at its start."""
    record_ttl_seconds: float = Field(default=1800.0, ge=3, le=YEAR_SECONDS)
    """How long Redis keeps a record that its node no longer renews."""
    handoff_lease_seconds: float = Field(default=10.0, gt=0, le=600)
    """How long a taker may lease a hand-off of this node; longer for large ones. After that it is
    available to other takers."""
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    """Lowest level that the node logs; `info` includes each hand-off taken, `debug` each time that
    its loop was blocked for more than 20 ms, and where."""
    idle_exit_seconds: float = Field(default=600.0, gt=0, le=YEAR_SECONDS)
    """A node that a client started ends after this time without clients."""

    @field_validator("store_url")
    @classmethod
    def _known_store(cls, value: str) -> str:
        return check_store_url(value)

    @field_validator(
        "store_password_file", "store_sentinel_password_file", "token_file", "http_token_file",
        "directory", "node_socket", *TLS_FILES, mode="before",
    )  # fmt: skip
    @classmethod
    def _absolute(cls, value: object) -> object:
        return absolute_path(value) if isinstance(value, str | Path) else value

    @field_validator("capacity_bytes")
    @classmethod
    def _fits_memory(cls, value: int) -> int:
        if value > (limit := memory_bytes()):
            raise ValueError(f"at most {limit} bytes, the memory of this machine")
        return value

    @field_validator("listen", "advertise")
    @classmethod
    def _node_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value

    @field_validator("http_listen")
    @classmethod
    def _http_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_http(value)
        return value

    @field_validator("token", "http_token")
    @classmethod
    def _usable_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_token(value.get_secret_value())
        return value

    @field_validator("http_token")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _HEADER_TOKEN.fullmatch(value.get_secret_value()):
            raise ValueError(
                "at most 256 of the letters, digits and signs that an HTTP header can carry"
            )
        return value

    @model_validator(mode="after")
    def _guarded(self) -> "BufferConfig":
        if self.http_listen is not None:
            host, _ = parse_http(self.http_listen)
            token = self.http_token or self.http_token_file
            guard_listener("'http_listen'", host, setting_advice("http_token"), token)
        if self.read_only and self.store_url == EMBEDDED:
            raise ValueError(
                "'read_only' is set, and 'store_url' is 'embedded', where nobody else stores "
                "anything; set 'store_url' to that of the nodes from which this one reads"
            )
        self._check_tls()
        host, _ = parse_address(self.listen)
        guard_listener(
            "'listen'",
            host,
            f"{setting_advice('token')}, or listen at a tls:// address",
            self.token or self.token_file or self.tls_files(),
        )
        self._check_reachable()
        for secret, file in TOKENS:
            if getattr(self, secret) is not None and getattr(self, file) is not None:
                raise ValueError(f"set only one of {secret!r} and {file!r}")
        self.store_access().check_passwords()
        return self

    def _check_tls(self) -> None:
        """Raises ValueError: the settings of TLS do not fit together."""
        given = [name for name in TLS_FILES if getattr(self, name) is not None]
        if not is_tls(self.listen):
            if given:
                raise ValueError(
                    f"{given[0]!r} is set, but 'listen' is {self.listen!r}, which is not "
                    "encrypted; allowed with it: tls://host:port"
                )
        elif len(given) < len(TLS_FILES):
            missing = [name for name in TLS_FILES if name not in given]
            raise ValueError(
                f"'listen' is {self.listen!r}: set {', '.join(map(repr, missing))} too "
                "(`lookup-buffer certificates` makes such files)"
            )
        elif self.node_id is None:
            raise ValueError(
                f"'listen' is {self.listen!r}: set 'node_id' too, a name in the certificate"
            )
        if self.advertise is not None and is_tls(self.advertise) != is_tls(self.listen):
            raise ValueError(
                f"'advertise' is {self.advertise!r} and 'listen' is {self.listen!r}; "
                "both are tcp://, or both are tls://"
            )

    def _check_reachable(self) -> None:
        """Raises ValueError: the address that the node publishes is none that a peer can dial."""
        name = "listen" if self.advertise is None else "advertise"
        address = self.advertise or self.listen
        host, port = parse_address(address)
        # At port 0 of `listen` the node gets a free one, and publishes that.
        if host in WILDCARDS or (name == "advertise" and port == 0):
            raise ValueError(
                f"{name!r} is {address!r}, to which no peer can connect; set 'advertise' to an "
                f"address of this host, as {urlsplit(self.listen).scheme}://10.0.0.7:7730"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "BufferConfig":
        """The configuration made of `settings`.

        Raises:
            ConfigError: names the first wrong setting, its value and what is allowed.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            raise explain(error, cls, settings) from None

    @classmethod
    def from_environment(cls, **overrides: Any) -> "BufferConfig":
        """Settings from `LOOKUP_BUFFER_<NAME>` variables; `overrides` that are not None win.

        `LOOKUP_BUFFER_<NAME>_FILE` names a file that holds the value instead. Those of secrets are
        settings of their own, since the node reads them.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls.of(override(settings_of_environment(cls.model_fields), given))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields that repr and str show, without a password in a URL."""
        for name, value in super().__repr_args__():
            yield name, _shown(value, str(name))

    def runtime_directory(self, *, make: bool = True) -> Path:
        """The directory of this host's node, its owner and mode checked. If there is none, it is
        created with mode 0700, or, without `make`, only said where it would be.

        Raises:
            ConfigError: it cannot be created, belongs to another user, or is open to others.
        """
        return runtime_directory(self.directory, make=make)

    def store_access(self) -> StoreAccess:
        """The settings for the store."""
        return StoreAccess(
            self.store_url,
            self.store_password.get_secret_value() if self.store_password else None,
            self.store_sentinel_password.get_secret_value()
            if self.store_sentinel_password
            else None,
            self.store_timeout_seconds,
            self.directory,
            self.store_password_file,
            self.store_sentinel_password_file,
            self.store_credential_provider,
        )

    def read_token(self) -> str:
        """The secret that this node shares with others. For processes that authenticate.

        Raises:
            ConfigError: its file cannot be read, or holds what is easy to guess.
        """
        return self._secret("token") or user_token()

    def read_peer_token(self, *, make: bool = True) -> str | None:
        """What nodes of this configuration prove to each other that they know; None: their
        certificates are enough, or, without `make`, this user has no token yet. Raises as
        `read_token`."""
        if self.tls_files() and self.token is None and self.token_file is None:
            return None
        return self.read_token() if make else self._secret("token") or known_user_token()

    def read_http_token(self) -> str | None:
        """The secret of those who read `/metrics`. Raises as `read_token`."""
        return self._secret("http_token")

    def check_files(self) -> None:
        """Raises ConfigError: a TLS option of the store's URL, the credential provider or the file
        of `http_token` cannot be used."""
        self.store_access().check_files()
        self.read_http_token()

    def _secret(self, name: str) -> str | None:
        settings = {name: getattr(self, name), f"{name}_file": None}
        if file := getattr(self, f"{name}_file"):
            settings[name] = read_secret(file, f"the file of setting '{name}_file'")
        checked: SecretStr | None = getattr(BufferConfig.of(settings), name)
        return checked.get_secret_value() if checked else None

    @property
    def mirrored(self) -> bool:
        """Whether to keep a mirror, if the store has one."""
        return not self.read_only if self.mirror is None else self.mirror

    def tls_files(self) -> TlsFiles | None:
        """None: `listen` is not a tls:// address."""
        if self.tls_certificate_file and self.tls_key_file and self.tls_authority_file:
            return TlsFiles(self.tls_certificate_file, self.tls_key_file, self.tls_authority_file)
        return None

    def expectations(self) -> dict[str, str | int]:
        """The settings that must be equal for a client and its node; compared when a session
        begins. Nothing of a secret: whoever listens at the socket is shown them."""
        return {
            "capacity_bytes": self.capacity_bytes,
            "store_url": _store_identity(self.store_url),
            "read_only": self.read_only,
        }

    def socket_path(self) -> Path:
        """The node's unix socket: `node_socket`, or the one in the runtime directory."""
        return self.node_socket or self.runtime_directory(make=False) / "node.sock"


def check_token(token: str) -> None:
    """Raises ValueError: the token is easy to guess. The message does not show it."""
    is_text = token.isprintable() and len(token.strip()) >= TOKEN_CHARACTERS_MIN
    if not is_text or _PLACEHOLDER.search(token):
        raise ValueError(
            f"at least {TOKEN_CHARACTERS_MIN} characters that can be printed, not a placeholder; "
            "`openssl rand -hex 32` makes a good one"
        )


def check_token_of(what: str, token: str | None) -> None:
    """Raises ConfigError: the token of `what` is easy to guess."""
    if token is not None:
        try:
            check_token(token)
        except ValueError as error:
            raise ConfigError(f"the token of {what} needs {error}") from None


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach a listener at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; names other than localhost may resolve to any address
        return host == "localhost"


def guard_listener(what: str, host: str, advice: str, token: object) -> None:
    """Refuse a listener that other hosts can reach, unless it requires a token.

    Raises:
        ConfigError: `what` listens at `host`, which is not loopback, and `token` is None. The
            message ends with `advice`: how the caller gives the token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(f"{what} is at {host!r}, which is not loopback: {advice}")


def setting_advice(secret: str) -> str:
    """How a secret is set where there are settings."""
    return f"set {secret!r} (or the setting '{secret}_file')"


ARGUMENT_ADVICE = (
    f"pass token=... (at least {TOKEN_CHARACTERS_MIN} characters, the same at both ends), or use "
    "127.0.0.1 for processes of this host"
)
"""How the token is given where there are no settings."""


def parse_tcp(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`. Raises ValueError, which states the form allowed."""
    return _parse(address, "tcp")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of a node's address, `tcp://host:port` or `tls://host:port`. Raises ValueError,
    which states the forms allowed."""
    return _parse(address, "tcp", "tls")


def is_tls(address: str) -> bool:
    """Whether nodes use TLS at this address."""
    return address.startswith("tls://")


def parse_http(address: str) -> tuple[str, int]:
    """Host and port of `http://host:port`. Raises ValueError, which states the form allowed."""
    return _parse(address, "http")


def _parse(address: str, *schemes: str) -> tuple[str, int]:
    forms = " or ".join(f"{scheme}://host:port" for scheme in schemes)
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is no number or too large, or the host is half an IPv6 address
        raise ValueError(f"an address of the form {forms}, with a port up to 65535") from None
    # `urlsplit` drops line breaks, and what is dialled is also sent.
    is_plain = address.isascii() and address.isprintable() and " " not in address
    more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    # `urlsplit` also takes TLS:// for tls://, and `is_tls` does not.
    scheme = address.partition("://")[0]
    if scheme not in schemes or not host or port is None or more or not is_plain:
        raise ValueError(f"an address of the form {forms}")
    # Who listens at localhost does so at 127.0.0.1. Who dials it is not to find another one at ::1.
    return "127.0.0.1" if host == "localhost" else host, port


def explain(
    error: ValidationError,
    model: type[BaseModel],
    settings: Mapping[str, Any],
    *,
    refused: Collection[str] = (),
) -> ConfigError:
    """An error of one line for the first wrong setting: its name, value and what is allowed. Of an
    unknown name it proposes similar ones, but none that are `refused` where the user writes it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not first["loc"]:  # a conflict between settings
        return ConfigError(allowed)
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown setting {name!r}{_nearest(name, model, refused)}")
    field = model.model_fields.get(name)
    secret = field is not None and "Secret" in str(field.annotation)
    if secret and f"{name}_file" in settings:
        name = f"{name}_file"
    shown = "(hidden)" if secret else repr(_shown(settings.get(name), name))
    return ConfigError(f"setting {name!r} is {shown}; allowed: {allowed}")


def _store_identity(url: str) -> str:
    """Where the store is, without credentials; equal for equal stores."""
    if url == EMBEDDED:
        return url
    if not is_foreign(url):
        return parse(url).place
    rest = url.partition("://")[2].partition("?")[0]
    place = rest.rpartition("@")[2]  # without user and password, which the digest would betray
    return f"{redact(url)} ({hashlib.sha256(place.encode()).hexdigest()[:8]})"


def _nearest(name: str, model: type[BaseModel], refused: Collection[str]) -> str:
    from difflib import get_close_matches  # takes 6 ms; imported for errors only

    allowed = sorted(model.model_fields.keys() - set(refused))
    near = get_close_matches(name, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {allowed}"


def _shown(value: object, name: str) -> object:
    """The setting's `value` without credentials, if it is a URL."""
    if not isinstance(value, str):
        return value
    # Also URLs without '@', as redis://:password without a host, and those of packages.
    of_store = value.partition("://")[0].lower() in SCHEMES
    of_store = of_store or (name == "store_url" and is_foreign(value))
    return redact(value) if of_store or "@" in value or ("?" in value and "://" in value) else value
