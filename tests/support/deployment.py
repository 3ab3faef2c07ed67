"""Runs what docker-compose.yml says as plain processes: its commands, its environments, its files.

One table turns the words of a container into those of this machine, in commands, environments and
mounted files alike. Each service gets a loopback address of its own, so that ports stay as they
are; what is mounted lies in a temporary folder. Programs are those of this machine, under the names
that the images have. Where this machine allows it a process is also contained as its container
would be: its user, no capabilities, a pid namespace of its own, nothing writable but its volumes
and /tmp.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lookup_buffer.config import BufferConfig
from nodes import ROOT, wait_until
from patience import scaled
from servers import valkey_executable

NODE_UID = 10001
"""The user in the images of nodes and engines."""
COMPOSE = ROOT / "docker-compose.yml"
TLS = ROOT / "deploy/tls.yml"
HEALTHY_SECONDS = scaled(120.0)
STOP_SECONDS = scaled(60.0)
SECRETS = "/run/secrets"
HERE = str(Path(sys.executable).parent)

# What the images call a program, and what it is here.
PROGRAMS: dict[str, Callable[[], str | None]] = {
    "valkey-server": valkey_executable,
    "valkey-cli": lambda: shutil.which("valkey-cli") or shutil.which("redis-cli"),
    "lookup-buffer": lambda: f"{HERE}/lookup-buffer",
    "python": lambda: sys.executable,
    "prometheus": lambda: shutil.which("prometheus"),
    "haproxy": lambda: shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin"),
    "wget": lambda: shutil.which("wget"),
}

# $1 is a list of folders that stay writable, $2 and $3 are folders that others may not enter and
# what in them has to be seen (an interpreter in somebody's home), the rest is a command.
_CONTAIN = """
set -e
for folder in $1; do mount --bind "$folder" "$folder"; done
mount -t tmpfs none /mnt
for folder in $3; do mkdir -p "/mnt$folder"; mount --bind "$folder" "/mnt$folder"; done
for folder in $2; do mount -t tmpfs -o mode=755 none "$folder"; done
for folder in $3; do mkdir -p "$folder"; mount --bind "/mnt$folder" "$folder"; done
shift 3
mount -o remount,bind,ro /
exec "$@"
"""


@cache
def document(overlay: Path | None = None) -> dict[str, Any]:
    """docker-compose.yml with its anchors and merges resolved, and with `overlay` on top of it."""
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    if overlay is not None:
        merge(loaded, yaml.safe_load(overlay.read_text(encoding="utf-8")))
    return loaded


def merge(under: dict[str, Any], over: dict[str, Any]) -> None:
    """As compose does: mappings are merged, lists are joined, commands are replaced."""
    for name, value in over.items():
        if isinstance(value, dict) and name in under:
            merge(under[name], value)
        elif isinstance(value, list) and name in under and name not in ("command", "test"):
            under[name] = [*under[name], *value]
        else:
            under[name] = value


def _stage(target: str) -> str:
    return (ROOT / "Dockerfile").read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]


def image_environment(target: str) -> dict[str, str]:
    """ENV of a target of the Dockerfile."""
    lines = re.findall(r"^ENV ((?:.*\\\n)*.*)$", _stage(target), flags=re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(lines)))


def image_entry_point(target: str) -> list[str]:
    """ENTRYPOINT of a target of the Dockerfile."""
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", _stage(target), flags=re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def interpolated(text: str, variables: dict[str, str]) -> str:
    """As compose does: `$$` is a dollar sign, `${NAME:-default}` a variable."""
    pattern = r"\$\$|\$\{(\w+):-([^}]*)\}"
    return re.sub(
        pattern,
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[2]),
        text,
    )


@dataclass
class Service:
    """One service as compose understands it."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    overlay: Path | None = None

    @property
    def raw(self) -> dict[str, Any]:
        found: dict[str, Any] = document(self.overlay)["services"][self.name]
        return found

    @property
    def image(self) -> str:
        return self._text(self.raw["image"])

    @property
    def command(self) -> list[str]:
        entry = self.raw.get("entrypoint") or image_entry_point(self.raw["build"]["target"])
        return [self._text(word) for word in [*entry, *self.raw.get("command", [])]]

    @property
    def environment(self) -> dict[str, str]:
        return {name: self._text(value) for name, value in self.raw.get("environment", {}).items()}

    @property
    def health_command(self) -> list[str]:
        kind, *words = self.raw["healthcheck"]["test"]
        words = [self._text(word) for word in words]
        return words if kind == "CMD" else ["/bin/sh", "-c", *words]

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """(source, target); a source is the path of a file of ours, or a volume's name."""
        return [tuple(each.split(":")[:2]) for each in self.raw.get("volumes", [])]

    @property
    def read_only_mounts(self) -> set[str]:
        """The sources of those mounts that the service may not write to."""
        return {each.split(":")[0] for each in self.raw.get("volumes", []) if each.endswith(":ro")}

    @property
    def user(self) -> tuple[int, int]:
        uid, gid = self.raw["user"].split(":")
        return int(uid), int(gid)

    def _text(self, word: object) -> str:
        return interpolated(str(word), self.variables)


class Stack:
    """The table, and the processes. Not thread-safe; `end` ends all of them."""

    def __init__(self, overlay: Path | None = None) -> None:
        self._overlay = overlay
        # Short, for the path of a unix socket is bounded; and open, for services have other users.
        self.base = Path(tempfile.mkdtemp(prefix="lbd-"))
        self.base.chmod(0o755)
        first, second = random.randrange(1, 255), random.randrange(256)
        names = list(document()["services"])
        self.addresses = {name: f"127.{first}.{second}.{n}" for n, name in enumerate(names, 1)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.base / "bin").mkdir()
        for name, find in PROGRAMS.items():
            if (path := find()) is not None:
                (self.base / "bin" / name).symlink_to(path)
        self._make_secrets()

    def _make_secrets(self) -> None:
        (self.base / "deploy").mkdir()
        script = shutil.copy(ROOT / "deploy/make-secrets", self.base / "deploy")
        subprocess.run([script], check=True, timeout=scaled(30))
        # A container sees only the files, not the folder that keeps others out here.
        (self.base / "deploy/secrets").chmod(0o755)

    def service(self, name: str) -> Service:
        return Service(name, overlay=self._overlay)

    def secret(self, name: str) -> str:
        return (self.base / "deploy/secrets" / name).read_text()

    def path(self, service: Service, path: str) -> Path:
        """Where a path inside of a container is here."""
        return Path(self.translated(service, path))

    def translated(self, service: Service, text: str) -> str:
        """`text` with every path and address of a container replaced."""
        table = {target: str(self._source(service, source)) for source, target in service.mounts}
        table[SECRETS] = str(self.base / "deploy/secrets")
        table |= dict.fromkeys(("0.0.0.0", "127.0.0.1"), self.addresses[service.name])
        folder = self.base / service.name / "tmp"
        patterns = [re.escape(word) for word in sorted(table, key=len, reverse=True)]
        names = "|".join(map(re.escape, self.addresses))
        pattern = rf"({'|'.join(patterns)})|\b({names})(?=:\d)|(?<![\w/])/tmp\b"

        def replace(found: re.Match[str]) -> str:
            if found[1]:
                return table[found[1]]
            return self.addresses[found[2]] if found[2] else str(folder)

        return re.sub(pattern, replace, text)

    def _source(self, service: Service, source: str) -> Path:
        if source.startswith("./"):
            return self.base / service.name / Path(source).name
        return self.base / "v" / source

    def prepare(self, service: Service) -> list[Path]:
        """Files and volumes of a service; returns what it may write."""
        own = self.base / service.name
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        (own / "tmp").chmod(0o1777)
        writable = [own / "tmp"]
        for source, _ in service.mounts:
            here = self._source(service, source)
            if source.startswith("./"):
                text = (ROOT / source).read_text(encoding="utf-8")
                here.write_text(self.translated(service, text), encoding="utf-8")
            else:
                if source not in service.read_only_mounts:
                    writable.append(here)
                if not here.exists():
                    here.mkdir(parents=True, mode=0o700)
                    if os.getuid() == 0:
                        os.chown(here, *service.user)
        return writable

    def environment(self, service: Service) -> dict[str, str]:
        """What the process gets, and nothing of the environment of the tests."""
        given = {n: self.translated(service, v) for n, v in service.environment.items()}
        return given | {"PATH": f"{self.base}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}

    def start(self, name: str, *, contained: bool = False) -> None:
        service = self.service(name)
        writable = self.prepare(service)
        command = [self.translated(service, word) for word in service.command]
        if contained:
            command = containing(command, service.user, writable)
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.environment(service), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, cwd="/",
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.base / f"{name}.log"

    def healthy(self, name: str) -> bool:
        """What the service's own health check says."""
        service = self.service(name)
        command = [self.translated(service, word) for word in service.health_command]
        try:
            done = subprocess.run(
                command,
                env=self.environment(service),
                capture_output=True,
                timeout=scaled(20),
                check=False,
            )
        except subprocess.TimeoutExpired:  # counts as ill, as with an engine of containers
            return False
        return done.returncode == 0

    def wait_healthy(self, *names: str) -> None:
        for name in names:

            def well(name: str = name) -> bool:
                assert self.processes[name].poll() is None, self.log(name).read_text()
                return self.healthy(name)

            wait_until(well, HEALTHY_SECONDS, f"{name} is healthy: {self.log(name).read_text()}")

    def execute(self, name: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
        """As `docker compose exec` does: another process beside the service's own."""
        service = self.service(name)
        if why_not_contained() is None:
            command = containing(command, service.user, self.prepare(service))
        return subprocess.run(
            command, env=self.environment(service), capture_output=True, text=True,
            timeout=scaled(60), check=False,
        )  # fmt: skip

    def pid(self, name: str) -> int:
        """Of the service itself, which is the one child of what contains it."""
        pid = self.processes[name].pid
        if Path(f"/proc/{pid}/comm").read_text().strip() == "unshare":
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return pid

    def stop(self, name: str) -> int:
        """As an engine of containers does; the exit code."""
        os.kill(self.pid(name), signal.SIGTERM)
        return self.processes.pop(name).wait(STOP_SECONDS)

    def kill(self, name: str) -> None:
        """Without a word; whatever contains it ends with it."""
        os.kill(self.pid(name), signal.SIGKILL)
        self.processes.pop(name).wait(STOP_SECONDS)

    def end(self) -> None:
        try:
            for name, process in list(self.processes.items()):
                if process.poll() is None:
                    self.kill(name)
        finally:
            shutil.rmtree(self.base)


def containing(command: list[str], user: tuple[int, int], writable: list[Path]) -> list[str]:
    """`command` as `user`, `cap_drop: [ALL]`, no-new-privileges and `read_only` have it run."""
    uid, gid = user
    wanted = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    closed = {path: hidden for path in wanted if (hidden := _closed_folder(path)) is not None}
    lists = [writable, sorted(set(closed.values())), list(closed)]
    # If the tests die, or what contains a process, it ends too. Twice: changing the user clears it.
    return [
        "setpriv", "--pdeathsig=KILL",
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        "/bin/sh", "-c", _CONTAIN, "contain", *(" ".join(map(str, each)) for each in lists),
        "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs",
        "--bounding-set=-all", "--inh-caps=-all", "--pdeathsig=KILL", "--", *command,
    ]  # fmt: skip


def _closed_folder(path: Path) -> Path | None:
    """The outermost folder above `path` that other users may not enter."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


@cache
def why_not_contained() -> str | None:
    """What keeps this machine from containing a process, or None."""
    if os.getuid() != 0:
        return "only root may contain a process as another user"
    try:
        done = subprocess.run(
            containing([sys.executable, "-P", "-c", "import lookup_buffer"], 2 * (NODE_UID,), []),
            capture_output=True, text=True, timeout=scaled(60), check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return done.stderr.strip() or None if done.returncode else None


def running_stack(*names: str) -> Iterator[Stack]:
    """For a fixture: these services, healthy, contained where this machine can."""
    stack = Stack()
    try:
        for name in names:
            stack.start(name, contained=why_not_contained() is None)
            stack.wait_healthy(name)
        yield stack
    finally:
        stack.end()


def client_config(stack: Stack, service: Service) -> BufferConfig:
    """What an engine beside this node has to say: the node's socket, store and capacity."""
    given = stack.environment(service)
    return BufferConfig.of(
        {
            "node_socket": Path(given["LOOKUP_BUFFER_DIRECTORY"]) / "node.sock",
            "node_uid": NODE_UID,
            "store_url": stack.translated(service, "redis://valkey:6379/0"),
            "capacity_bytes": given["LOOKUP_BUFFER_CAPACITY_BYTES"],
        }
    )
