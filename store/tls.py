"""TLS contexts from the options of a URL, which have redis-py's names.

Errors say which option or file is at fault and why, which Python's own errors do not.
"""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_PEM: Final = "in PEM format"
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class TlsOptionError(OSError):
    """A TLS option cannot be used. The message names the option, its file and the reason."""

    def __init__(self, option: str, value: object, why: str) -> None:
        super().__init__(f"{option} {value}: {why}")
        self.option, self.value, self.why = option, value, why


def tls_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    """Build a client context. With `ssl_ca_certs` or `ssl_ca_path` only these authorities are
    trusted, else the system's.

    Raises:
        TlsOptionError: an option cannot be used.
    """
    for option in _FILES:
        if option in options:
            _check_readable(option, options[option])
    context = _context_of_authorities(options)
    if "ssl_certfile" in options:
        _load_certificate(context, options)
    elif "ssl_keyfile" in options:
        raise _fault(options, "ssl_keyfile", "a key needs its certificate; set ssl_certfile too")
    is_verified = options.get("ssl_cert_reqs") != "none"
    context.check_hostname = is_verified and options.get("ssl_check_hostname", True)
    context.verify_mode = ssl.CERT_REQUIRED if is_verified else ssl.CERT_NONE
    for flag in options.get("ssl_include_verify_flags", ()):
        context.verify_flags |= ssl.VerifyFlags[flag]
    for flag in options.get("ssl_exclude_verify_flags", ()):
        context.verify_flags &= ~ssl.VerifyFlags[flag]
    if "ssl_min_version" in options:
        context.minimum_version = ssl.TLSVersion(options["ssl_min_version"])
    if "ssl_ciphers" in options:
        _set_ciphers(context, options)
    return context


class TlsContexts:
    """The context for new connections. It is built again when one of its files has changed, as by a
    renewal of certificates: building it takes 10 ms, in which the loop stands still.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._context: ssl.SSLContext | None = None
        self._stamps: list[tuple[int, ...] | None] = []

    def current(self) -> ssl.SSLContext:
        """Raises TlsOptionError, as `tls_context`."""
        stamps = [file_stamp(self._options[name]) for name in _FILES if name in self._options]
        if self._context is None or stamps != self._stamps:
            self._context = tls_context(self._options)
            self._stamps = stamps
        return self._context


def file_stamp(path: str | Path) -> tuple[int, ...] | None:
    """Changes with the file's content; None if there is no such file."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _context_of_authorities(options: Mapping[str, Any]) -> ssl.SSLContext:
    folder = options.get("ssl_ca_path")
    if folder is not None:
        try:
            os.scandir(folder).close()
        except (OSError, ValueError) as error:
            raise _unreadable("ssl_ca_path", folder, error) from error
    try:
        return ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=folder)
    except ssl.SSLError as error:
        raise _fault(options, "ssl_ca_certs", f"it contains no certificate {_PEM}") from error


def _set_ciphers(context: ssl.SSLContext, options: Mapping[str, Any]) -> None:
    try:
        context.set_ciphers(options["ssl_ciphers"])
    except ssl.SSLError as error:
        raise _fault(options, "ssl_ciphers", "OpenSSL has none of these") from error


_OF_ANOTHER = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons for a key that does not belong to the certificate; the last one also if the key
is of another type.
"""


def _load_certificate(context: ssl.SSLContext, files: Mapping[str, Any]) -> None:
    certificate, key = files["ssl_certfile"], files.get("ssl_keyfile")
    try:
        # With a password, else OpenSSL prompts on the terminal for an encrypted key's passphrase.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if not _has_certificate(certificate):
            why = f"it contains no certificate {_PEM}"
            raise _fault(files, "ssl_certfile", why) from error
        option = "ssl_certfile" if key is None else "ssl_keyfile"
        why = f"it contains no private key {_PEM} without a passphrase"
        if error.reason in _OF_ANOTHER:
            why = f"the key does not belong to the certificate in {certificate}"
        raise _fault(files, option, why) from error


def _check_readable(option: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _unreadable(option, path, error) from error


def _unreadable(option: str, path: str, error: Exception) -> TlsOptionError:
    return TlsOptionError(option, path, getattr(error, "strerror", None) or str(error))


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _fault(options: Mapping[str, Any], option: str, why: str) -> TlsOptionError:
    return TlsOptionError(option, options[option], why)
