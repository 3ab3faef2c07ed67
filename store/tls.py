"""TLS: how a client trusts and proves itself, out of the files that a URL names.

Says which file is at fault and why, which Python does not.
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PEM: Final = "in PEM"


class TlsFileError(OSError):
    """A file cannot be used. The text names the option, the file, and what is wrong with it."""


def tls_context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Who is named an authority trusts that one alone; else those of the system.

    Raises:
        TlsFileError: a file cannot be used.
    """
    for option, path in files.items():
        _check_readable(option, path)
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca_certs"))
    except ssl.SSLError as error:
        raise _fault(files, "ssl_ca_certs", f"there is no certificate in it, {_PEM}") from error
    if "ssl_certfile" in files:
        _load_certificate(context, files)
    elif "ssl_keyfile" in files:
        raise _fault(files, "ssl_keyfile", "a key is of no use without ssl_certfile")
    return context


_OF_ANOTHER = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of a key that is another certificate's; the last one where it is of another
kind, too."""


def _load_certificate(context: ssl.SSLContext, files: Mapping[str, str]) -> None:
    certificate, key = files["ssl_certfile"], files.get("ssl_keyfile")
    try:
        # A password, for OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if not _has_certificate(certificate):
            why = f"there is no certificate in it, {_PEM}"
            raise _fault(files, "ssl_certfile", why) from error
        option = "ssl_certfile" if key is None else "ssl_keyfile"
        why = f"there is no private key in it, {_PEM} and without a passphrase"
        if error.reason in _OF_ANOTHER:
            why = f"the key is not that of the certificate in {certificate}"
        raise _fault(files, option, why) from error


def _check_readable(option: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError) as error:  # the second: a zero byte in it
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
