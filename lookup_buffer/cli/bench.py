"""`lookup-buffer bench`: the speed of this host's pipes, against memcpy and a bare socket.

Checks the options, the memory and the server first. Then it measures with `cli.speeds`, and prints
a table or JSON. `cli.speeds` needs torch, so it is imported last. Runs on the main thread.
"""

import importlib.util
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from lookup_buffer.cli.check_host import available_bytes
from lookup_buffer.cli.options import as_json, refuse_password, size_of
from lookup_buffer.cli.output import print_json, print_line, print_table
from lookup_buffer.inspection.access import CommandError, ExitCode
from lookup_buffer.inspection.records import size_text

if TYPE_CHECKING:
    from lookup_buffer.cli.speeds import Speed

SIZES: Final = ("2MiB", "8MiB", "64MiB")
SMALLEST_BYTES, LARGEST_BYTES = 1 << 10, 1 << 30
COPIES: Final = 8
"""Copies of the largest message in memory at one time: in both processes and in the pipes."""
START_SECONDS: Final = 5.0
QUIET_SECONDS: Final = 2.0
"""A command that takes longer shows a progress line on a terminal."""


@click.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    default=SIZES,
    show_default=True,
    metavar="SIZE",
    help="Size of a message; may be given several times.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    help="Time to measure, for all pipes and sizes; the start adds to it.",
)
@click.option(
    "--redis",
    metavar="URL",
    help="Also measure the pipe through this server, which gets all the messages.",
)
@as_json
def bench(sizes: tuple[str, ...], seconds: float, redis: str | None, json: bool) -> None:
    """Measure this host's pipes against memcpy and a bare socket.

    Between two processes of this host (inproc: two threads), one sends requests and the other
    answers with a tensor. Ratios are of speed: 0.50 x of memcpy is half as fast. Other load affects
    the result, so measure on an idle machine.
    """
    nbytes = sorted({_checked(size) for size in sizes})
    if importlib.util.find_spec("torch") is None:
        raise CommandError(
            "pipes carry torch's tensors, and torch is not installed: pip install torch",
            ExitCode.USAGE,
        )
    _check_memory(nbytes[-1])
    pipes = ["inproc", "shm", "tcp"]
    if redis is not None:
        _check_server(redis)
        pipes.append(redis)
    found = _measured(pipes, nbytes, seconds / (len(pipes) * len(nbytes)))
    if json:
        print_json({"speeds": [speed.as_json() for speed in found]})
    else:
        _print(found)


def _checked(text: str) -> int:
    size = size_of("--size", text)
    assert size is not None  # the option has a value
    if not SMALLEST_BYTES <= size <= LARGEST_BYTES:
        raise CommandError(f"--size is {text!r}; allowed: 1KiB to 1GiB", ExitCode.USAGE)
    return size


def _check_server(url: str) -> None:
    """Connect to the server before the measurements; its pipe is measured last.

    Raises:
        CommandError: the URL holds a password.
        StoreError: the server cannot be used, as opening the pipe would raise.
    """
    from lookup_buffer.pipes.redis_dial import dial

    refuse_password("--redis", url)
    dial(url, START_SECONDS).close()


def _check_memory(nbytes: int) -> None:
    needed, free = COPIES * nbytes, available_bytes()
    if free is not None and needed > free:
        raise CommandError(
            f"messages of {size_text(nbytes)} need {size_text(needed)} of memory, "
            f"{size_text(free)} are free; choose a smaller --size",
            ExitCode.USAGE,
        )


def _measured(pipes: list[str], sizes: list[int], seconds: float) -> list["Speed"]:
    started = time.monotonic()
    from lookup_buffer.cli.speeds import PipeOpener

    found = []
    with PipeOpener(max(sizes)) as opener:
        for pipe in pipes:
            with opener.opened(pipe) as benchmark:
                for nbytes in sizes:
                    if time.monotonic() - started > QUIET_SECONDS:
                        _show_progress(f"measuring {benchmark.name} with {size_text(nbytes)} …")
                    found.append(benchmark.measure(nbytes, seconds))
    _show_progress("")
    return found


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _print(found: list["Speed"]) -> None:
    rows = []
    for speed in found:
        limit = "-" if speed.expected_seconds is None else f"≤ {_time_text(speed.expected_seconds)}"
        rows.append(
            [
                speed.pipe,
                size_text(speed.nbytes),
                _time_text(speed.seconds),
                f"{size_text(speed.nbytes / speed.seconds)}/s",
                f"{speed.over_memcpy:.2f} x",
                "-" if speed.over_bare is None else f"{speed.over_bare:.2f} x",
                limit,
                speed.verdict,
            ]
        )
    numeric = ("SIZE", "TIME", "SPEED", "OF MEMCPY", "OF SOCKET", "SHOULD BE")
    print_table(["PIPE", *numeric, ""], rows, numeric=numeric)
    slow = [f"{one.pipe} with {size_text(one.nbytes)}" for one in found if one.verdict == "slow"]
    if slow:
        print_line(
            f"slower than it should be: {', '.join(slow)}. Measure again on an idle machine; if it "
            "stays slow, check the processor's clock, other virtual machines on the same host and, "
            "for tcp, a firewall on loopback"
        )


def _time_text(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
