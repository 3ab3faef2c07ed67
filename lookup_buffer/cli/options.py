"""The options that commands share, and the configuration that results from them.

The first source that has a value counts: the option, the configuration file, the environment, the
defaults of `BufferConfig`. Secrets come from files or variables only. `BufferConfig` is imported
late, so that `--help` stays fast.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lookup_buffer.access import StoreAccess, override
from lookup_buffer.environment import parse_bytes, read_secret
from lookup_buffer.inspection.access import CommandError, ExitCode

if TYPE_CHECKING:
    from lookup_buffer.config import BufferConfig

_AGE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(s|m|min|h|d)?")
_AGE_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
SECRET_FILES: Final = (
    "store_password_file", "store_sentinel_password_file", "token_file", "http_token_file",
)  # fmt: skip
FILE: Final = click.Path(path_type=Path)

store_url: Final = click.option(
    "--store-url",
    metavar="URL",
    help="Where the metadata is stored: 'embedded', or a URL without a password: redis://, "
    "redis-sentinel://, redis-cluster://, each also with rediss, valkey or valkeys, or unix://.",
)
store_password_file: Final = click.option(
    "--store-password-file", type=FILE, metavar="FILE", help="File that holds the store's password."
)
store_sentinel_password_file: Final = click.option(
    "--store-sentinel-password-file",
    type=FILE,
    metavar="FILE",
    help="File that holds the sentinels' password.",
)
directory: Final = click.option(
    "--directory",
    type=FILE,
    metavar="DIR",
    help="Runtime directory of this host's node (sockets, lock, log).",
)
of_namespace: Final = click.option(
    "--namespace",
    metavar="FINGERPRINT",
    help="Only this namespace; its beginning is enough.",
)
as_json: Final = click.option("--json", "json", is_flag=True, help="Print one JSON document.")


def of_store(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that read a store: where it is, and the form of the output."""
    for option in (
        as_json,
        directory,
        store_password_file,
        store_url,
    ):  # click shows the last one first
        command = option(command)
    return command


def store_access(
    store_url: str | None, store_password_file: Path | None, directory: Path | None
) -> StoreAccess:
    """The access to the store, the only configuration that most commands need.

    Raises:
        ConfigError: a setting is wrong, or the file cannot be read.
        CommandError: the command line holds a password.
    """
    refuse_password("--store-url", store_url)
    _check_secret("store_password_file", store_password_file)
    return StoreAccess.from_environment(
        store_url=store_url,
        store_password_file=store_password_file,
        directory=directory,
    )


def configure(
    *,
    config_file: Path | None = None,
    **settings: Any,
) -> "BufferConfig":
    """The configuration. A value of None in `settings` means that the option was not given.

    Raises:
        ConfigError: a setting is wrong, or a file of a secret cannot be read.
        CommandError: `config_file` cannot be read, or the command line holds a secret.
    """
    from lookup_buffer.config import BufferConfig

    refuse_password("--store-url", settings.get("store_url"))
    for name in SECRET_FILES:
        _check_secret(name, settings.get(name))
    given = {name: value for name, value in settings.items() if value is not None}
    merged = override(_read_settings(config_file) if config_file is not None else {}, given)
    return BufferConfig.from_environment(**merged)


def _check_secret(setting: str, file: Path | None) -> None:
    """Raise a ConfigError if the file, which an option names, has no secret."""
    if file is not None:
        read_secret(file, f"the file of --{setting.replace('_', '-')}")


def refuse_password(option: str, url: str | None) -> None:
    """Raise a CommandError if `url`, from the command line, holds a password."""
    from store import StoreUrlError
    from store.schemes import may_hold_password

    try:
        exposed = url is not None and may_hold_password(url)
    except StoreUrlError:
        return  # 'embedded', or no URL: the configuration reports it with the setting's name
    if exposed:
        advice = "choose a server without a password"
        if option == "--store-url":
            advice = (
                "put the URL into LOOKUP_BUFFER_STORE_URL or the password into a file for "
                "--store-password-file"
            )
        raise CommandError(
            f"a password in {option} is visible to every user of this machine; {advice}",
            ExitCode.USAGE,
        )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"--config {path} cannot be read: {error.strerror}"
        raise CommandError(why, ExitCode.USAGE) from error
    except ValueError as error:
        raise CommandError(f"--config {path} is not JSON: {error}", ExitCode.USAGE) from error
    if not isinstance(settings, dict):
        raise CommandError(
            f'--config {path} must hold one JSON object, such as {{"capacity_bytes": "8GiB"}}',
            ExitCode.USAGE,
        )
    return settings


def seconds_of(option: str, text: str | None) -> float | None:
    """The seconds in `90`, `5m`, `2h` or `1d`.

    Raises:
        CommandError: it is none of these.
    """
    if text is None:
        return None
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise CommandError(f"{option} is {text!r}; allowed: 30s, 5m, 2h, 1d", ExitCode.USAGE)
    return float(match[1]) * _AGE_SECONDS[match[2] or "s"]


def size_of(option: str, text: str | None) -> int | None:
    """The bytes in `4096`, `16KiB` or `8MB`.

    Raises:
        CommandError: it is none of these.
    """
    if text is None:
        return None
    parsed = parse_bytes(text.strip())
    if not isinstance(parsed, int):
        raise CommandError(f"{option} is {text!r}; allowed: 4096, 16KiB, 8MB", ExitCode.USAGE)
    return parsed
