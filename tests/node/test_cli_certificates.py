"""`lookup-buffer certificates`: what it writes, and what it refuses."""

import datetime
import stat
from pathlib import Path

import pytest

from command_line import run
from lookup_buffer.cli import certificates
from lookup_buffer.config import TlsFiles
from lookup_buffer.errors import ConfigError
from lookup_buffer.protocol.tls import Tls


def files_of(folder: Path, node: str) -> TlsFiles:
    return TlsFiles(folder / f"{node}.pem", folder / f"{node}-key.pem", folder / "authority.pem")


def test_nodes_can_use_what_it_makes(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    made = run("certificates", str(folder), "node-a", "node_b.example")
    assert made.returncode == 0, made.stderr
    assert f"LOOKUP_BUFFER_TLS_KEY_FILE={folder}/node-a-key.pem" in made.stdout
    for node in ("node-a", "node_b.example"):
        Tls(files_of(folder, node), node)
    with pytest.raises(ConfigError, match="of 'node-a'; allowed"):
        Tls(files_of(folder, "node-a"), "node_b.example")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert len(modes) == 6, "no draft is left"
    assert {mode for name, mode in modes.items() if "-key" in name} == {0o600}


def test_a_second_call_renews_by_the_same_authority(tmp_path: Path) -> None:
    run("certificates", str(tmp_path), "node-a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run("certificates", str(tmp_path), "node-a", "node-b", "--days", "7").returncode == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    same = {name for name in before if before[name] == after[name]}
    assert same == {"authority.pem", "authority-key.pem"}
    for node in ("node-a", "node-b"):
        Tls(files_of(tmp_path, node), node)


def test_readers_have_certificates_of_their_own(tmp_path: Path) -> None:
    made = run("certificates", str(tmp_path), "reader-a", "--reader")
    assert made.returncode == 0, made.stderr
    assert "LOOKUP_BUFFER_READ_ONLY=true" in made.stdout
    Tls(files_of(tmp_path, "reader-a"), "reader-a", read_only=True)
    assert "READ_ONLY" not in run("certificates", str(tmp_path), "node-a").stdout


def test_none_outlives_its_authority(tmp_path: Path) -> None:
    now, key = certificates._now(), certificates._new_key()

    def with_authority_for(days: float) -> None:
        until = now + datetime.timedelta(days=days)
        before = now - datetime.timedelta(days=3000)
        made = certificates._signed("authority", key, "authority", key, before, until, names=None)
        (tmp_path / "authority.pem").write_bytes(certificates._pem(made))
        (tmp_path / "authority-key.pem").write_bytes(certificates._key_pem(key))

    def certify(days: int) -> tuple[int, str]:
        done = run("certificates", str(tmp_path), "node-a", "--days", str(days))
        return done.returncode, done.stderr

    with_authority_for(100.5)
    code, said = certify(101)
    assert (code, "sooner than in 101 days; allowed: --days up to 100, or" in said) == (2, True)
    assert not (tmp_path / "node-a.pem").exists()
    assert certify(100)[0] == 0
    with_authority_for(-1)
    code, said = certify(1)
    assert (code, "allowed: a new authority" in said) == (2, True)
    assert certify(4000)[0] == 2, "longer than any authority's"


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("../evil", "the node's id is"),
        ("authority", "not 'authority'"),
        ("", "the node's id is"),
        ("authority-key", "not with '-key'"),
        ("node-a-key", "not with '-key'"),
    ],
)
def test_an_impossible_node_is_refused(tmp_path: Path, node: str, reason: str) -> None:
    refused = run("certificates", str(tmp_path / "new"), node)
    assert refused.returncode == 2
    assert reason in refused.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("garbled", ["authority.pem", "authority-key.pem"])
def test_another_authority_is_left_alone(tmp_path: Path, garbled: str) -> None:
    run("certificates", str(tmp_path), "node-a")
    (tmp_path / garbled).write_text("something else")
    refused = run("certificates", str(tmp_path), "node-a")
    assert refused.returncode == 1
    assert "move both away" in refused.stderr
    assert (tmp_path / garbled).read_text() == "something else"
    (tmp_path / garbled).unlink()
    refused = run("certificates", str(tmp_path), "node-a")
    assert refused.returncode == 1
    assert f"{garbled} cannot be written or read" in refused.stderr


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "cryptography.py").write_text("raise ImportError\n")
    refused = run("certificates", str(tmp_path / "new"), "node-a", PYTHONPATH=str(tmp_path))
    assert refused.returncode == 2
    assert "pip install 'lookup-buffer[certificates]'" in refused.stderr
