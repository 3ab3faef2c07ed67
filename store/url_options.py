"""Options of store URLs: those of redis-py that work, each with its type; why others are refused.

Pure: reads no file and imports neither redis-py nor OpenSSL. Nothing here shows an option's value.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

CLIENT_NAME: Final = "lookup-buffer"
"""How the names of connections begin, if `client_name` does not say otherwise."""
CONNECTIONS_MAX: Final = 64
"""Connections to one server, if `max_connections` does not say otherwise. More than a node has
threads.
"""
_CLIENT_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_CIPHERS = re.compile(r"[A-Za-z0-9:+!@=_.-]{1,512}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_NAMEABLE = re.compile(r"[a-z_]{1,40}")
_FLAGS = {
    **dict.fromkeys(("true", "yes", "1", "t", "y"), True),
    **dict.fromkeys(("false", "no", "0", "f", "n"), False),
}
_VERIFY_FLAGS = frozenset(
    (
        *("VERIFY_X509_STRICT", "VERIFY_X509_PARTIAL_CHAIN", "VERIFY_X509_TRUSTED_FIRST"),
        *("VERIFY_CRL_CHECK_LEAF", "VERIFY_CRL_CHECK_CHAIN", "VERIFY_ALLOW_PROXY_CERTS"),
    )
)


@dataclass(frozen=True, slots=True)
class _Option:
    allowed: str
    """Which values it may have, in words."""
    read: Callable[[str], Any]
    """The typed value of a text; None if the text is not allowed."""


def _flag(text: str) -> bool | None:
    return _FLAGS.get(text.lower())


def _whole(low: int, high: int) -> _Option:
    def read(text: str) -> int | None:
        fits = text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high
        return int(text) if fits else None

    return _Option(f"a whole number from {low} to {high}", read)


def _seconds(high: int) -> _Option:
    def read(text: str) -> float | None:
        return float(text) if _NUMBER.fullmatch(text) and float(text) <= high else None

    return _Option(f"seconds from 0 (off) to {high}", read)


def _pattern(pattern: re.Pattern[str], allowed: str) -> _Option:
    return _Option(allowed, lambda text: text if pattern.fullmatch(text) else None)


def _verify_flags(text: str) -> tuple[str, ...] | None:
    names = tuple(name.strip() for name in text.strip("[]").split(","))
    return names if _VERIFY_FLAGS.issuperset(names) else None


_ANY_TEXT = _Option("any text", lambda text: text)
_FILE = _Option(
    "an absolute path, since a node runs in /", lambda text: text if text[:1] == "/" else None
)
_BOOLEAN = _Option("true or false", _flag)
_VERIFY = _Option(f"one or more of {', '.join(sorted(_VERIFY_FLAGS))}", _verify_flags)

DATABASE: Final[Mapping[str, _Option]] = {"db": _ANY_TEXT}
"""`parse` reads it together with the database in the path."""
SENTINEL: Final[Mapping[str, _Option]] = {
    "sentinel_username": _ANY_TEXT,
    "sentinel_password": _ANY_TEXT,
}
OWN: Final[Mapping[str, _Option]] = {
    "client_name": _pattern(_CLIENT_NAME, "1 to 64 characters of A-Za-z0-9._:-"),
    "max_connections": _whole(1, 4096),
}
"""Not passed to the connections as they are."""
CONNECTION: Final[Mapping[str, _Option]] = {
    "health_check_interval": _seconds(86_400),
    "protocol": _whole(2, 3),
    "socket_read_size": _whole(1024, 1 << 24),
}
TCP: Final[Mapping[str, _Option]] = {"socket_keepalive": _BOOLEAN}
TLS: Final[Mapping[str, _Option]] = {
    "ssl_ca_certs": _FILE,
    "ssl_ca_path": _FILE,
    "ssl_certfile": _FILE,
    "ssl_keyfile": _FILE,
    "ssl_cert_reqs": _Option(
        "required, or none: then any server is believed to be yours, and gets your password",
        lambda text: text if text in ("required", "none") else None,
    ),
    "ssl_check_hostname": _BOOLEAN,
    "ssl_min_version": _Option("771 (TLS 1.2) or 772 (TLS 1.3)", {"771": 771, "772": 772}.get),
    "ssl_ciphers": _pattern(_CIPHERS, "a list of ciphers as OpenSSL writes it"),
    "ssl_include_verify_flags": _VERIFY,
    "ssl_exclude_verify_flags": _VERIFY,
}
SHOWN: Final = frozenset((*DATABASE, *OWN, *CONNECTION, *TCP, *TLS))
"""Options whose values are no secrets."""

_TIMEOUT = "set 'store_timeout_seconds', which bounds connecting and each call"
_BYTES = "replies are read as bytes, and decoded where they are text"
_NO_RETRY = "a call has one deadline, and the caller decides whether to repeat it"
_IN_ADDRESS = "write it into the address, before the '?'"
_NO_SETINFO = "the library's name is not sent, which an ACL user may not do; see 'client_name'"
_NO_OCSP = "redis-py's asyncio client does not check OCSP"
_NOT_TEXT = "it is an object of a program, not a text"
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout", "timeout"), _TIMEOUT),
    **dict.fromkeys(("retry_on_timeout", "retry_on_error", "retry"), _NO_RETRY),
    **dict.fromkeys(("decode_responses", "encoding", "encoding_errors"), _BYTES),
    **dict.fromkeys(("host", "port", "path", "username"), _IN_ADDRESS),
    "password": "set 'store_password' or 'store_password_file', or write it before the '@'",
    "credential_provider": "set 'store_credential_provider'",
    **dict.fromkeys(("lib_name", "lib_version", "driver_info"), _NO_SETINFO),
    "legacy_responses": "it shapes the replies of redis-py's commands, which are not used",
    "socket_keepalive_options": "set 'socket_keepalive'; its times are the system's, or redis-py's",
    "ssl": "write rediss:// or valkeys:// as the scheme",
    "ssl_ca_data": "name a file by 'ssl_ca_certs'",
    "ssl_password": "a passphrase in a URL is a secret beside its key; store the key without one",
    **dict.fromkeys(
        (
            *("ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context"),
            "ssl_ocsp_expected_cert",
        ),
        _NO_OCSP,
    ),
    **dict.fromkeys(
        (
            *("connection_class", "connection_pool", "encoder_class", "event_dispatcher"),
            *("himport_registry", "maint_notifications_config", "parser_class"),
            *("redis_connect_func", "socket_type"),
        ),
        _NOT_TEXT,
    ),
}
"""Options of redis-py that are not for store URLs, and what to do instead."""
_ELSEWHERE: Final = (
    (DATABASE, "a cluster has only database 0"),
    (SENTINEL, "it is for redis-sentinel:// and its like only"),
    (TCP, "a Unix socket has no such option"),
    (TLS, "it is for TLS only; write rediss:// or valkeys://"),
)


@dataclass(slots=True)
class Options:
    """The options of one URL, typed. `fault` says what is wrong with the first wrong one."""

    values: dict[str, Any] = field(default_factory=dict)
    fault: str = ""

    def of(self, group: Mapping[str, _Option]) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name in group}


def read_options(query: str, *groups: Mapping[str, _Option]) -> Options:
    """The options in `query`, which must be of these groups. Does not raise."""
    allowed = {name: option for group in groups for name, option in group.items()}
    options = Options()
    for text in query.split("&") if query else ():
        name, equals, value = text.partition("=")
        option = allowed.get(name)
        if option is None:
            options.fault = _unknown(name, allowed, query, has_value=bool(equals))
        elif not equals:
            options.fault = f"the option {name} has no value; allowed: {option.allowed}"
        elif name in options.values:
            options.fault = f"the option {name} is given twice"
        elif (taken := option.read(unquote(value))) is None:
            options.fault = f"the option {name} has another value than allowed: {option.allowed}"
        else:
            options.values[name] = taken
        if options.fault:
            break
    else:
        options.fault = _conflict(options.values)
    return options


def _conflict(values: Mapping[str, Any]) -> str:
    if values.get("ssl_cert_reqs") == "none" and values.get("ssl_check_hostname"):
        return "ssl_check_hostname=true needs ssl_cert_reqs=required"
    return ""


def _unknown(name: str, allowed: Mapping[str, _Option], query: str, *, has_value: bool) -> str:
    """Why the option is refused. A text that may be part of a secret is not repeated."""
    if name in _REFUSED:
        return f"the option {name} is not for store URLs: {_REFUSED[name]}"
    for group, why in _ELSEWHERE:
        if name in group:
            return f"the option {name} is not allowed here: {why}"
    # What follows a '?' is part of a password if an '@' comes later, or an '&' in a password.
    shown = has_value and _NAMEABLE.fullmatch(name) and not re.search("@|password", query)
    return f"unknown option{f' {name}' if shown else ''}; allowed are {', '.join(allowed)}"
