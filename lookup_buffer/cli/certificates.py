"""`lookup-buffer certificates`: a small authority, and certificates that it signs for nodes.

For fleets without an authority of their own; a node takes certificates of any. The authority's key
stays in the directory: who has it can certify nodes. Needs the package `cryptography`. Runs on the
main thread; only writes files.
"""

import datetime
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lookup_buffer.cli.options import FILE
from lookup_buffer.cli.output import print_line
from lookup_buffer.inspection.access import CommandError, ExitCode

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY: Final = "authority"
"""The authority's files are called so; no node can be."""
KEY: Final = "-key"
DAYS: Final = 365
AUTHORITY_DAYS: Final = 3650
_BEFORE: Final = datetime.timedelta(hours=1)
"""So much earlier a certificate begins: clocks of hosts differ."""
_NODE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,48}")


@click.command()
@click.argument("folder", type=FILE)
@click.argument("nodes", metavar="NODE_ID...", nargs=-1, required=True)
@click.option(
    "--days",
    type=click.IntRange(1, AUTHORITY_DAYS - 1),
    default=DAYS,
    help=f"Validity; default: {DAYS}.",
)
@click.option("--reader", is_flag=True, help="For nodes that only read (setting read_only).")
def certificates(folder: Path, nodes: tuple[str, ...], days: int, reader: bool) -> None:
    """Make certificates for TLS between nodes.

    FOLDER gets the certificate and the key of an authority, unless it has them, and those of each
    node, in PEM. A node's files are replaced, which renews its certificate; a running node reads
    them again.
    """
    for node in nodes:
        if not _NODE_ID.fullmatch(node) or node == AUTHORITY or node.endswith(KEY):
            raise CommandError(
                f"the node's id is {node!r}; allowed: 1 to 48 letters, digits, '.', '_' and '-', "
                f"not {AUTHORITY!r}, and not with {KEY!r} at the end, as the files of keys",
                ExitCode.USAGE,
            )
    try:
        import cryptography  # noqa: F401 -- before anything is written

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority.of(folder)
        authority.check_lasts(datetime.timedelta(days=days))
        for node in nodes:
            authority.certify(node, folder, datetime.timedelta(days=days), reader=reader)
    except ImportError as error:
        raise CommandError(
            "the package cryptography is not installed: pip install 'lookup-buffer[certificates]'",
            ExitCode.USAGE,
        ) from error
    except OSError as error:
        sentence = f"{error.filename} cannot be written or read: {error.strerror}"
        raise CommandError(sentence, ExitCode.FOUND) from error
    for node in nodes:
        certificate, key = _paths(folder.absolute(), node)
        print_line(f"{'reader' if reader else 'node'} {node}, for {days} days:")
        print_line(f"  LOOKUP_BUFFER_NODE_ID={node}")
        print_line(f"  LOOKUP_BUFFER_TLS_CERTIFICATE_FILE={certificate}")
        print_line(f"  LOOKUP_BUFFER_TLS_KEY_FILE={key}")
        print_line(f"  LOOKUP_BUFFER_TLS_AUTHORITY_FILE={_paths(folder.absolute(), AUTHORITY)[0]}")
        if reader:
            print_line("  LOOKUP_BUFFER_READ_ONLY=true")
    print_line(
        f"give each host the three files of its node; {_paths(folder, AUTHORITY)[1]} stays here"
    )


class Authority:
    """Raises ImportError: the package `cryptography` is not installed."""

    def __init__(self, certificate: "x509.Certificate", key: "EllipticCurvePrivateKey") -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def of(cls, folder: Path) -> "Authority":
        """The one in `folder`, which is made if there is none.

        Raises:
            CommandError: its files are not a certificate and a key, one of them is missing, or
                another user owns one of them or the folder, or all users may write in it.
            OSError: they cannot be read or written.
        """
        certificate, key = _paths(folder, AUTHORITY)
        for path in (folder, certificate, key):
            _check_owner(path)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise CommandError(
                f"all users may write in {folder}: one could place his authority there meanwhile; "
                "take a folder of your own",
                ExitCode.FOUND,
            )
        if certificate.exists() or key.exists():
            return cls._read(certificate, key)
        authority = cls.make(AUTHORITY)
        _write(key, _key_pem(authority._key), mode=0o600)
        _write(certificate, _pem(authority._certificate), mode=0o644)
        return authority

    @classmethod
    def make(cls, name: str) -> "Authority":
        key, until = _new_key(), _now() + datetime.timedelta(days=AUTHORITY_DAYS)
        certificate = _signed(name, key, name, key, _now() - _BEFORE, until, names=None)
        return cls(certificate, key)

    @classmethod
    def _read(cls, certificate: Path, key: Path) -> "Authority":
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            read = x509.load_pem_x509_certificate(certificate.read_bytes())
            private = load_pem_private_key(key.read_bytes(), None)
        except (ValueError, TypeError) as error:  # TypeError: the key needs a passphrase
            raise CommandError(
                f"{certificate} or {key} is not of this command: move both away", ExitCode.FOUND
            ) from error
        if (
            not isinstance(private, EllipticCurvePrivateKey)
            or private.public_key() != read.public_key()
        ):
            raise CommandError(f"{key} does not belong to {certificate}", ExitCode.FOUND)
        return cls(read, private)

    def check_lasts(self, valid: datetime.timedelta) -> None:
        """Raises CommandError: it expires before a certificate would that is made now."""
        until = self._certificate.not_valid_after_utc
        if _now() + valid > until:
            left = (until - _now()).days
            shorter = f"--days up to {left}, or " if left > 0 else ""
            raise CommandError(
                f"the authority's certificate expires on {until:%Y-%m-%d}, sooner than in "
                f"{valid.days} days; allowed: {shorter}a new authority: see "
                "docs/operations.md, 'Rotating certificates'",
                ExitCode.USAGE,
            )

    def certify(
        self,
        node: str,
        folder: Path,
        valid: datetime.timedelta,
        now: datetime.datetime | None = None,
        *,
        reader: bool = False,
    ) -> tuple[Path, Path]:
        """Write certificate and key of `node`, which only reads if it is a `reader`; returns their
        paths."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        from lookup_buffer.protocol.tls import READER

        key, now = _new_key(), now or _now()
        names = self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = str(names[0].value) if names else AUTHORITY
        own: list[x509.GeneralName] = [x509.DNSName(node)]
        if reader:
            own.append(x509.UniformResourceIdentifier(READER))
        certificate = _signed(node, key, name, self._key, now - _BEFORE, now + valid, names=own)
        paths = _paths(folder, node)
        _write(paths[1], _key_pem(key), mode=0o600)
        _write(paths[0], _pem(certificate), mode=0o644)
        return paths


def _check_owner(path: Path) -> None:
    """Raises CommandError: another user owns the file, or the link to it. He would have the key of
    the authority, and could certify nodes."""
    with suppress(FileNotFoundError):
        owners = {path.lstat().st_uid, path.stat().st_uid}
        if not owners <= {0, os.geteuid()}:
            raise CommandError(
                f"{path} belongs to another user, who could certify nodes with it: take a folder "
                "of your own",
                ExitCode.FOUND,
            )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}{KEY}.pem"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _signed(
    name: str,
    key: "EllipticCurvePrivateKey",
    issuer: str,
    issuer_key: "EllipticCurvePrivateKey",
    begins: datetime.datetime,
    ends: datetime.datetime,
    *,
    names: "list[x509.GeneralName] | None",
) -> "x509.Certificate":
    """`names`: of a node; None for the authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    is_authority = names is None
    extensions: list[tuple[Any, bool]] = [
        (x509.BasicConstraints(is_authority, 0 if is_authority else None), True),
        (key_usage(is_authority), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False),
    ]
    if names is not None:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions += [
            (x509.SubjectAlternativeName(names), False),
            (x509.ExtendedKeyUsage(both), False),
        ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(_subject(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256())


def key_usage(is_authority: bool) -> "x509.KeyUsage":
    """What a key may do. Python 3.13 refuses an authority that does not say it."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace the file as a whole: a node may read it at any time."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
