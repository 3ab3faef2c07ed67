"""What strangers say, kept as files: `hostile/FOLDER/NAME.hex`, hexadecimal with a comment.

`frames` are refused by whoever reads frames, `node` by a node, `pipe` by the ends of pipes, of any
scheme. Each file is all that is said after the handshake, on a connection of its own.
"""

from pathlib import Path

_ROOT = Path(__file__).parent / "hostile"


def hostile(*folders: str) -> dict[str, bytes]:
    """The bytes of these folders' files, by `FOLDER/NAME`."""
    return {
        f"{folder}/{path.stem}": _bytes_of(path)
        for folder in folders
        for path in sorted((_ROOT / folder).glob("*.hex"))
    }


def _bytes_of(path: Path) -> bytes:
    lines = path.read_text().splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))
