"""TLS contexts from the files that a URL names.

Errors say which file is at fault and why, which Python's own errors do not.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PEM: Final = "in PEM format"


class TlsFileError(OSError):
    """A file cannot be used. The message names the option, the file and the reason."""


def tls_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Build a client context. With `ssl_ca_certs` only that authority is trusted, else the
    system's.

    Raises:
        TlsFileError: a file cannot be used.
    """
    for option, path in files.items():
        _check_readable(option, path)
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
    except ssl.SSLError as error:
        raise _fault(files, "ssl_ca_certs", f"it contains no certificate {_PEM}") from error
    if "ssl_certfile" in files:
        _load_certificate(context, files)
    elif "ssl_keyfile" in files:
        raise _fault(files, "ssl_keyfile", "a key needs its certificate; set ssl_certfile too")
    return context


_OF_ANOTHER = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons for a key that does not belong to the certificate; the last one also if the key
is of another type.
"""


def _load_certificate(context: ssl.SSLContext, files: Mapping[str, str]) -> None:
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
        why = getattr(error, "strerror", None) or str(error)
        raise TlsFileError(f"{option} {path}: {why}") from error


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _fault(files: Mapping[str, str], option: str, why: str) -> TlsFileError:
    return TlsFileError(f"{option} {files[option]}: {why}")
