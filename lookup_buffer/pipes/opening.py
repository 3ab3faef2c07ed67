"""From an address to a pipe: the scheme names the module, which is imported on its first use."""

import importlib
from collections.abc import Mapping
from typing import Final

from lookup_buffer.config import check_token_of
from lookup_buffer.errors import ConfigError
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from store import redact

SCHEMES: Final[Mapping[str, str]] = {
    "inproc": "inproc://NAME, between threads of a process",
    "shm": "shm:///PATH, between processes of a host",
    "tcp": "tcp://HOST:PORT, between hosts",
    "redis": "redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]?pipe=NAME, by way of a database",
    "rediss": "the same with rediss (TLS)",
    "valkey": "valkey",
    "valkeys": "valkeys (TLS)",
    "unix": "unix:///SOCKET?pipe=NAME, by way of a database on this host",
    "gloo": "gloo://HOST:PORT, between hosts, large payload by Gloo",
    "nccl": "nccl://HOST:PORT[?device=cuda:N], between GPUs, large payload by NCCL",
}
_MODULES: Final = dict.fromkeys(("rediss", "valkey", "valkeys", "unix"), "redis")
"""Of those schemes whose module has another name."""
OPEN_SECONDS: Final = 30.0


def open_pipe(
    uri: str,
    *,
    listen: bool = False,
    timeout: float = OPEN_SECONDS,
    token: str | None = None,
    limits: PipeLimits | None = None,
) -> KVPipe:
    """One end of the pipe at `uri`; one end listens, the other (or several) connect.

    A listening end returns at once; where it was given port 0, `pipe.uri` says which it got. A
    connecting end waits up to `timeout` seconds for the other one to listen.

    Args:
        token: both ends must know the same; see `link.connect`. At least 16 characters; needed to
            listen beyond loopback. Not for `inproc`.

    Raises:
        ConfigError: the address is not one of `SCHEMES`, or it needs another token.
        PipeTimeout: nobody listens there within the time.
        PipeError: see `KVPipe`.
        NodeRefused: the other end has another token or version.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES or not rest:
        allowed = "; ".join(SCHEMES.values())
        shown = redact(uri) if "@" in uri else uri
        raise ConfigError(f"{shown!r} is no address of a pipe; allowed are {allowed}")
    check_token_of("a pipe", token)
    module = importlib.import_module(f"lookup_buffer.pipes.{_MODULES.get(scheme, scheme)}")
    pipe: KVPipe = module.open_end(
        uri, listen=listen, timeout=timeout, token=token, limits=limits or PipeLimits()
    )
    return pipe
