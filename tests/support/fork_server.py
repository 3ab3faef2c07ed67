"""Programs that import much start by fork, from one process that has imported it.

Each process of an engine imports vLLM and torch, which takes 13 of the 15 processor seconds of its
start; an engine behind vLLM's server has three. Here the standard library's fork server imports
them once, and every program is a fork of it: `python -m MODULE` with arguments, environment, log
and session of its own. Where vLLM then spawns a process, that is a fork too; what it is told comes
by pickle through a pipe, as where it is really spawned, and it keeps no other open file.

Some variables are read before any line of Python runs, or while vLLM is imported: each set of them
has a fork server of its own, which lives as long as this process. A program that is to start as
users start it is executed.
"""

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.util
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from examples.demo.engine_settings import MEMORY_VARIABLES

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
PRELOADED = "vllm_preloaded"
"""The module that imports what all engines do."""
_USUAL = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    **MEMORY_VARIABLES,
}
_READ_EARLY = (
    "HF_", "LD_PRELOAD", "MALLOC_", "OMP_", "PYTHONHASHSEED", "TRANSFORMERS_", "TRITON_INTERPRET",
)  # fmt: skip
_FILL, _M_PERTURB = "MALLOC_PERTURB_", -6
"""The one variable of glibc's that a running process can follow: `mallopt(3)`."""
_START_SECONDS = 120.0
_SERVER_LOST = 255
"""The exit code that the library reports of a fork that may still run."""
_FILE = re.compile(r"\{\d\}")


class Forked:
    """A running fork, as much of `subprocess.Popen` as who starts engines needs."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() in (None, _SERVER_LOST):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; the negative number of a signal. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    keep: Sequence[int] = (),
    preloaded: str = PRELOADED,
    forked: bool = True,
    appends: bool = False,
) -> "subprocess.Popen[bytes] | Forked":
    """Run `python -m MODULE ARGUMENTS` as a session leader whose output goes to `log`.

    `keep` are the numbers of files that the program inherits, to which its arguments refer by
    "{0}", "{1}" and so on. With `appends`, what the log holds already stays.
    """
    if not appends:
        log.write_bytes(b"")
    if not forked:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *_numbered(arguments, keep)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONPATH": _path(environment)},
                cwd=ROOT,
                pass_fds=tuple(keep),
                start_new_session=True,
            )
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        return fork(
            module, arguments, streams=(nothing, written, written),
            environment=environment, keep=keep, preloaded=preloaded,
        )  # fmt: skip
    finally:
        os.close(written)
        os.close(nothing)


def fork(
    module: str,
    arguments: Sequence[str],
    *,
    streams: tuple[int, int, int],
    environment: Mapping[str, str],
    keep: Sequence[int] = (),
    preloaded: str = PRELOADED,
) -> Forked:
    """As `launch`, with these files as its input, output and errors."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _Process(
        target=_run,
        args=(
            theirs, module, list(arguments), _Files(streams), dict(environment), _Files(keep),
        ),
        name=module,
    )  # fmt: skip
    process.server = _Server(preloaded, _early(environment))
    process.start()
    theirs.close()
    with ours:  # by then it leads its session, and whoever kills that session kills it
        assert ours.poll(_START_SECONDS), f"{module} was not forked"
        ours.recv()
    return Forked(process)


def finished(
    source: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> tuple[int, str]:
    """The exit code and the output of a program that runs to its end; its files are in `folder`."""
    name = "program_of_test"
    (folder / f"{name}.py").write_text(source)
    path = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH", "")]))
    log = folder / f"{name}.log"
    process = launch(name, arguments, log=log, environment={**environment, "PYTHONPATH": path})
    try:
        code = process.wait(timeout_seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, log.read_text(errors="replace")


def own_environment() -> dict[str, str]:
    """The variables of this process. A server that another thread starts meanwhile changes them."""
    with _starting:
        return dict(os.environ)


class _Process(ForkServerProcess):
    """A process that a server with its early variables forks."""

    server: "_Server"

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
        assert isinstance(process_obj, _Process)
        server = process_obj.server.running()
        with _starting:
            usual = forkserver.connect_to_new_process
            forkserver.connect_to_new_process = server.connect_to_new_process
            try:
                return _Popen(process_obj)
            finally:
                forkserver.connect_to_new_process = usual


class _Popen(popen_forkserver.Popen):
    """The library polls all processes whenever one is started. An exit code can be read only once:
    without the lock, a thread that waits for it meanwhile may get the code for a lost server."""

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            wait([self.sentinel])
        with _polling:
            return super().poll(os.WNOHANG)


_polling = threading.Lock()
_starting = threading.Lock()
_running: dict["_Server", forkserver.ForkServer] = {}


@dataclass(frozen=True, slots=True)
class _Server:
    """What a fork server has imported, and the variables that it was started with."""

    preloaded: str
    variables: tuple[tuple[str, str], ...]

    def running(self) -> forkserver.ForkServer:
        """Start it, if it does not run."""
        with _starting:
            if self not in _running:
                _running[self] = forkserver.ForkServer()
                _running[self].set_forkserver_preload([self.preloaded])
            self._ensure_running(_running[self])
            return _running[self]

    def _ensure_running(self, server: forkserver.ForkServer) -> None:
        before = dict(os.environ)
        os.environ.update(self.variables)
        os.environ["PYTHONPATH"] = _path(os.environ)
        try:
            server.ensure_running()
        finally:
            for name in {*dict(self.variables), "PYTHONPATH"}:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]


def _early(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that a program's fork server must have been started with."""
    wanted = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name != _FILL
    }
    if "TRITON_INTERPRET" in wanted:  # and with the backend that it is for
        wanted["PYTHONPATH"] = environment["PYTHONPATH"]
    return tuple(sorted((_USUAL | wanted).items()))


def _path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH, with the modules of the tests' support."""
    return os.pathsep.join(filter(None, [str(SUPPORT), environment.get("PYTHONPATH", "")]))


def _numbered(arguments: Sequence[str], files: Sequence[int]) -> list[str]:
    return [
        str(files[int(argument[1:-1])]) if _FILE.fullmatch(argument) else argument
        for argument in arguments
    ]


class _Files:
    """File descriptors, which get to the process that these are unpickled in."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._files: Sequence[Any] = numbers

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in self._files]

    def __setstate__(self, files: list[Any]) -> None:
        self._files = files

    def numbers(self) -> list[int]:
        return [file.detach() for file in self._files]


def _run(
    started: Connection,
    module: str,
    arguments: list[str],
    streams: _Files,
    environment: dict[str, str],
    files: _Files,
) -> None:
    gc.freeze()  # a full collection passes over what the fork server holds: 1 s of vLLM's
    os.setsid()
    for standard, number in enumerate(streams.numbers()):
        os.dup2(number, standard)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    if fill := environment.get(_FILL):
        ctypes.CDLL(None).mallopt(_M_PERTURB, int(fill))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    multiprocessing.util.spawnv_passfds = _spawn_by_fork  # type: ignore[assignment]
    os.chdir(ROOT)
    sys.argv = [module, *_numbered(arguments, files.numbers())]
    started.send(True)
    started.close()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # the library ends a fork without them
        atexit._run_exitfuncs()


_spawn = multiprocessing.util.spawnv_passfds


def _spawn_by_fork(path: bytes, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: what `multiprocessing.spawn` executes is
    run in a fork."""
    if arguments[-1] != "--multiprocessing-fork":
        return _spawn(path, arguments, kept)
    gc.freeze()  # nothing that this process holds is finalised in the other
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.enable()
        _reset_signals()
        _close_files_except({0, 1, 2, *kept})
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(arguments[arguments.index("-c") + 1], {"__name__": "__main__"})
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reset_signals() -> None:
    """As after an execution: what the other process handled is handled by default."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_files_except(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number not in kept:
            try:
                os.close(number)
            except OSError:
                pass  # the listing's own
