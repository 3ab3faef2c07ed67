"""Shell completion: the proposals in a real bash, and where the scripts are put."""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from command_line import PROGRAM, assert_refused, environment, run
from lookup_buffer.cli.commands import app
from patience import scaled

BASH = shutil.which("bash")


def offered(line: str, home: Path) -> set[str]:
    """What bash's own completion function, as it is installed, offers at the end of `line`."""
    assert BASH is not None
    installed = run("--install-completion", "bash", HOME=str(home))
    assert installed.returncode == 0, installed.stderr
    script = home / ".local/share/bash-completion/completions/lookup-buffer"
    assert str(script) in installed.stdout
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = (
        # As bash's `complete` does: find the function of the command, and call it.
        f"source '{script}'; set -e\n"
        "spec=$(complete -p lookup-buffer); function=${spec##*-F }; function=${function%% *}\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
        f"$function lookup-buffer '{words[-1]}' '{words[-2]}'\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [BASH, "--norc", "--noprofile", "-c", ask],
        capture_output=True, text=True, timeout=scaled(60), check=False,
        env=environment({"PATH": f"{Path(PROGRAM).parent}:{os.environ['PATH']}"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(BASH is None, reason="no bash on the PATH")
@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("lookup-buffer ", {"ls", "show", "why", "doctor", "serve"}, {"--limit"}),
        ("lookup-buffer s", {"serve", "show", "stats"}, {"ls"}),
        ("lookup-buffer ls --", {"--namespace", "--older-than", "--json"}, {"--token-file"}),
        ("lookup-buffer why --na", {"--namespace"}, {"--json"}),
        ("lookup-buffer --install-completion ", {"bash", "zsh", "fish"}, {"ls"}),
    ],
)
def test_bash(tmp_path: Path, line: str, wanted: set[str], unwanted: set[str]) -> None:
    found = offered(line, tmp_path)
    assert wanted <= found
    assert not found & unwanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts(tmp_path: Path, shell: str) -> None:
    shown = run("--show-completion", shell)
    assert shown.returncode == 0, shown.stderr
    assert f"_LOOKUP_BUFFER_COMPLETE={shell}_complete" in shown.stdout
    installed = run("--install-completion", shell, HOME=str(tmp_path))
    assert installed.returncode == 0, installed.stderr
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert script.read_text() == shown.stdout
    if (found := shutil.which(shell)) is not None:  # the CI has bash alone
        subprocess.run([found, "-n", str(script)], check=True, timeout=scaled(60))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".zfunc").touch()
    done = run("--install-completion", "zsh", HOME=str(tmp_path))
    assert_refused(done, 1, "cannot be written")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have them: a number without an entry, and no HOME."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    done = CliRunner().invoke(app, ["--install-completion", "bash"])
    assert done.exit_code == 1
    assert done.stderr.startswith("lookup-buffer: the home directory is unknown: set HOME")
