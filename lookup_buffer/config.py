"""What a user may set, validated when built: `BufferConfig`.

Secrets are `SecretStr`: they show in no repr, error or log line.
"""

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
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
    StoreAccess,
    check_store_url,
    runtime_directory,
)
from lookup_buffer.environment import settings_of_environment
from lookup_buffer.errors import ConfigError
from lookup_buffer.sizes import parse_bytes
from store import redact
from store.url import SCHEMES

GIB = 1 << 30
YEAR_SECONDS = 366 * 86_400.0
SECRETS = ("token", "http_token", "store_password", "store_sentinel_password")
WILDCARDS = ("0.0.0.0", "::")
TOKEN_CHARACTERS_MIN = 16
_HEADER_TOKEN = re.compile(r"[!-~]{1,256}")
_PLACEHOLDER = re.compile(
    r"(replace|change)[-_ ]?(me|this)|placeholder|your[-_ ]?(token|secret|password)|example|^<.*>$",
    re.IGNORECASE,
)


def memory_bytes() -> int:
    """Bytes of memory that this process may use: the smaller of the machine's and its cgroup's."""
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


class BufferConfig(BaseModel):
    """Settings of a node and of the clients that start it. Immutable; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store_url: str = EMBEDDED
    """Where the metadata lives: `embedded` (a Valkey of this host) or a Redis or Valkey URL."""
    store_password: SecretStr | None = None
    """Password for the store, kept out of the URL."""
    store_sentinel_password: SecretStr | None = None
    """Password for the sentinels of the store, where they have one of their own."""
    store_timeout_seconds: float = Field(default=TIMEOUT_SECONDS, gt=0, le=TIMEOUT_SECONDS_MAX)
    """Bound on one call to the store."""
    mirror: bool = True
    """Keep what the store said of keys, corrected by its push; off: ask it each time."""
    capacity_bytes: Bytes = Field(default=4 * GIB, ge=1 << 20)
    """Size of the arena, a number of bytes or `8GiB`."""
    node_socket: Path | None = None
    """Unix socket of a running node; none means: find this host's node, or start it."""
    directory: Path | None = None
    """Runtime directory (sockets, lock, log); none means one per user."""
    node_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,48}$")
    """Name of the node in Redis; none means the host's name and a random suffix."""
    listen: str = "tcp://127.0.0.1:0"
    """Address on which the node serves other nodes; port 0 picks a free one."""
    advertise: str | None = None
    """Address that other nodes are told; none means the address listened on."""
    token: SecretStr | None = None
    """Secret that the nodes of a fleet share; needed to listen beyond loopback."""
    http_listen: str | None = None
    """Address, as `http://127.0.0.1:7731`, of `/metrics` and `/healthz`; none: not served."""
    http_token: SecretStr | None = None
    """Secret that who reads `/metrics` sends as `Authorization: Bearer`; needed to serve it beyond
    loopback. Another one than `token`, by which tensors may be had."""
    record_ttl_seconds: float = Field(default=1800.0, ge=3, le=YEAR_SECONDS)
    """How long Redis keeps a record that its holder stops renewing."""
    handoff_lease_seconds: float = Field(default=10.0, gt=0, le=600)
    """How long a taker may have a hand-off of this node before others may; more for large ones."""
    log_level: Literal["error", "warning", "info"] = "warning"
    """What the node writes into its log; `info` names each hand-off that was taken."""
    idle_exit_seconds: float = Field(default=600.0, gt=0, le=YEAR_SECONDS)
    """A node that was started automatically ends when it had no client for so long."""

    @field_validator("store_url")
    @classmethod
    def _known_store(cls, value: str) -> str:
        return check_store_url(value)

    @field_validator("capacity_bytes")
    @classmethod
    def _fits_memory(cls, value: int) -> int:
        if value > (limit := memory_bytes()):
            raise ValueError(f"at most {limit} bytes, the memory of this machine")
        return value

    @field_validator("listen", "advertise")
    @classmethod
    def _tcp_address(cls, value: str | None) -> str | None:
        if value is not None:
            parse_tcp(value)
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
            guard_listener("'http_listen'", host, "http_token", self.http_token)
        host, _ = parse_tcp(self.listen)
        guard_listener("'listen'", host, "token", self.token)
        if host in WILDCARDS and self.advertise is None:
            raise ValueError(
                f"the settings need 'advertise', because 'listen' is {self.listen!r}: no peer "
                "gets there"
            )
        self.store_access().check_passwords()
        return self

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "BufferConfig":
        """The configuration of `settings`.

        Raises:
            ConfigError: naming the first wrong setting, its value and what is allowed.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            raise explain(error, cls, settings) from None

    @classmethod
    def from_environment(cls, **overrides: Any) -> "BufferConfig":
        """Settings from `LOOKUP_BUFFER_<NAME>` variables; `overrides` that are not None win.

        `LOOKUP_BUFFER_TOKEN_FILE` and the like for the passwords name files instead.
        """
        settings: dict[str, Any] = dict(settings_of_environment(cls.model_fields))
        settings |= {name: value for name, value in overrides.items() if value is not None}
        return cls.of(settings)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What repr and str show: not the password that a URL may hold."""
        for name, value in super().__repr_args__():
            yield name, _shown(value)

    def runtime_directory(self) -> Path:
        """The directory of this host's node, created with mode 0700 and checked to be ours.

        Raises:
            ConfigError: it cannot be made, belongs to somebody else, or is open to others.
        """
        return runtime_directory(self.directory)

    def store_access(self) -> StoreAccess:
        """What of it is about the store."""
        return StoreAccess(
            self.store_url,
            self.store_password.get_secret_value() if self.store_password else None,
            self.store_sentinel_password.get_secret_value()
            if self.store_sentinel_password
            else None,
            self.store_timeout_seconds,
            self.directory,
        )

    def expectations(self) -> dict[str, str | int]:
        """What a client and a node must agree on; compared when a session begins."""
        token = self.token.get_secret_value() if self.token else ""
        return {
            "capacity_bytes": self.capacity_bytes,
            "store_url": redact(self.store_url),
            "token": hashlib.sha256(f"lookup-buffer:{token}".encode()).hexdigest()[:16],
        }

    def socket_path(self) -> Path:
        """The node's unix socket: `node_socket`, or the one in the runtime directory."""
        return self.node_socket or self.runtime_directory() / "node.sock"


def check_token(token: str) -> None:
    """Raises ValueError: anybody could guess this token. The message does not show it."""
    is_text = token.isprintable() and len(token.strip()) >= TOKEN_CHARACTERS_MIN
    if not is_text or _PLACEHOLDER.search(token):
        raise ValueError(
            f"at least {TOKEN_CHARACTERS_MIN} characters that can be printed, and no placeholder; "
            "`openssl rand -hex 32` makes a good one"
        )


def check_token_of(what: str, token: str | None) -> None:
    """Raises ConfigError: `what` was given a token that anybody could guess."""
    if token is not None:
        try:
            check_token(token)
        except ValueError as error:
            raise ConfigError(f"the token of {what} needs {error}") from None


def is_loopback(host: str) -> bool:
    """Whether only this host's processes reach what listens at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: what others mean may be resolved to any address
        return host == "localhost"


def guard_listener(what: str, host: str, needed: str, token: object) -> None:
    """Refuse to listen where other hosts reach us, unless they need a token.

    Raises:
        ConfigError: `what` listens at `host`, which is not loopback, and `token` is None.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{what} is at {host!r}, which is not loopback, and needs {needed!r} "
            f"(or, among settings, '{needed}_file')"
        )


def parse_tcp(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; ValueError says what is allowed."""
    return _parse(address, "tcp")


def parse_http(address: str) -> tuple[str, int]:
    """Host and port of `http://host:port`; ValueError says what is allowed."""
    return _parse(address, "http")


def _parse(address: str, scheme: str) -> tuple[str, int]:
    parts = urlsplit(address)
    if parts.scheme != scheme or not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise ValueError(f"an address of the form {scheme}://host:port")
    return parts.hostname, parts.port


def explain(
    error: ValidationError, model: type[BaseModel], settings: Mapping[str, Any]
) -> ConfigError:
    """One line for the first thing that is wrong: the setting, its value, what is allowed."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    allowed = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not first["loc"]:  # several settings that do not go together
        return ConfigError(allowed)
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown setting {name!r}{_nearest(name, model)}")
    field = model.model_fields.get(name)
    secret = field is not None and "Secret" in str(field.annotation)
    if secret and f"{name}_file" in settings:
        name = f"{name}_file"
    shown = "(hidden)" if secret else repr(_shown(settings.get(name)))
    return ConfigError(f"setting {name!r} is {shown}; allowed: {allowed}")


def _nearest(name: str, model: type[BaseModel]) -> str:
    from difflib import get_close_matches  # 6 ms that only a mistake should pay

    near = get_close_matches(name, model.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {sorted(model.model_fields)}"


def _shown(value: object) -> object:
    """`value` without the credentials that a URL may carry."""
    if not isinstance(value, str):
        return value
    # Also without '@': redis://:password, which lacks its host.
    of_store = value.partition("://")[0].lower() in SCHEMES
    return redact(value) if of_store or "@" in value or ("?" in value and "://" in value) else value
