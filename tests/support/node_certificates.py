"""Certificates of nodes for tests, by the authority that `lookup-buffer certificates` makes."""

import datetime
import shutil
from pathlib import Path
from typing import Any

from cryptography import x509

from lookup_buffer.cli import certificates
from lookup_buffer.cli.certificates import AUTHORITY, Authority
from lookup_buffer.config import TLS_FILES, TlsFiles
from lookup_buffer.protocol.tls import Tls

DAY = datetime.timedelta(days=1)


class Files:
    """What an authority has signed, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._authority = Authority.of(folder)

    def of(
        self,
        node: str,
        *,
        days: int = 30,
        now: datetime.datetime | None = None,
        reader: bool = False,
    ) -> TlsFiles:
        """Valid from now on, or from `now`."""
        certificate, private = self._authority.certify(
            node, self.folder, days * DAY, now, reader=reader
        )
        return TlsFiles(certificate, private, self.folder / "authority.pem")

    def named(self, name: str, *names: x509.GeneralName) -> TlsFiles:
        """A certificate with these names, whatever they are; `name` is that of its file."""
        key, now = certificates._new_key(), certificates._now()
        ends = (now - DAY, now + DAY)
        authority = self._authority._key
        made = certificates._signed(name, key, AUTHORITY, authority, *ends, names=[*names])
        paths = certificates._paths(self.folder, name)
        paths[0].write_bytes(certificates._pem(made))
        paths[1].write_bytes(certificates._key_pem(key))
        return TlsFiles(*paths, self.folder / "authority.pem")

    def tls(self, node: str, *, reader: bool = False) -> Tls:
        return Tls(self.of(node, reader=reader), node, read_only=reader)


def install(files: TlsFiles, folder: Path) -> TlsFiles:
    """Replace the files of a node by `files`, one after the other."""
    for source in files:
        draft = folder / "draft"
        shutil.copy(source, draft)
        draft.replace(folder / f"{source.name}")
    return TlsFiles(*(folder / source.name for source in files))


def settings_of(files: TlsFiles, node: str) -> dict[str, Any]:
    given: dict[str, Any] = dict(zip(TLS_FILES, files, strict=True))
    return {**given, "node_id": node, "listen": "tls://127.0.0.1:0"}
