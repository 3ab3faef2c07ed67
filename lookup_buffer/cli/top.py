"""`lookup-buffer top`: nodes, hits, misses and the hottest keys, live or once.

Takes samples of the store, on the main thread; connects to no node.
"""

import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookup_buffer.cli.options import of_store, store_access
from lookup_buffer.cli.output import print_json, print_line, print_table, shown
from lookup_buffer.inspection.access import opened_store
from lookup_buffer.inspection.history import Activity, Sample, take_sample
from lookup_buffer.inspection.records import size_text
from lookup_buffer.times import SILENT_SECONDS
from store import BlockingStore, StoreUnavailable
from store.record import SAFE_NAME

if TYPE_CHECKING:
    from rich.console import Group

NAMESPACES_SECONDS = 30.0
"""Time between two scans for namespaces. Each scan reads all keys of the server."""
WINDOW_SECONDS = 5.0
"""The period of the rates. Nodes write their heartbeats and counters once a second."""
_HITS = ("hits_local", "hits_remote", "hits_lane")
_NODE_NUMBERS = ("ITEMS", "USED", "OF", "HITS/s", "MISSES/s", "FETCHED/s")
_KEY_NUMBERS = ("HITS/s", "HITS")
_WIDE = 70
_FOR_WIDE = ("ITEMS", "USED", "OF", "FETCHED/s", "SPACE", "HITS")
"""Columns that are left out on a narrower screen."""


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@of_store
def top(
    interval: float,
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Watch the fleet: nodes, hits and misses a second, the keys with the most hits.

    Live on a terminal until Ctrl-C. In a pipe, or with --json, one sample of 2 s.
    """
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "top") as store:
        if json or not sys.stdout.isatty():
            activity = _watch_once(store, max(interval, SILENT_SECONDS))
            if json:
                print_json(_to_json(activity))
            else:
                _print(activity)
            return
        try:
            _watch(store, interval)
        except KeyboardInterrupt:
            return


def _watch_once(store: BlockingStore, seconds: float) -> Activity:
    spaces = _namespaces(store)
    first = store.run(take_sample(store.browsed, spaces, time.monotonic()))
    time.sleep(seconds)
    return Activity(first, store.run(take_sample(store.browsed, spaces, time.monotonic())))


def _watch(store: BlockingStore, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    samples: deque[Sample] = deque(maxlen=max(1, round(WINDOW_SECONDS / interval)) + 1)
    spaces, scan_at = list[str](), 0.0
    with Live(Text("reading the store …"), screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            try:
                if now >= scan_at:
                    spaces, scan_at = _namespaces(store), now + NAMESPACES_SECONDS
                samples.append(store.run(take_sample(store.browsed, spaces, now)))
            except StoreUnavailable as error:  # try again: the store may come back
                samples.clear()
                live.update(Text(shown(str(error))), refresh=True)
            if samples and now - samples[0].at >= SILENT_SECONDS:
                activity = Activity(samples[0], samples[-1])
                live.update(_screen(activity, live.console.width), refresh=True)
            time.sleep(interval)


def _namespaces(store: BlockingStore) -> list[str]:
    return sorted(name for name in store.namespaces() if SAFE_NAME.match(name))


def _to_json(activity: Activity) -> dict[str, Any]:
    return {
        "seconds": round(activity.seconds, 3),
        "nodes": {
            node: {"alive": activity.alive(node), "counted": dict(activity.of_node(node))}
            for node in sorted(activity.last.beats)
        },
        "counted": dict(activity.of_all()),
        "hottest": [
            {"namespace": space, "key": key, "hits_meanwhile": meanwhile, "hits": hits}
            for (space, key), meanwhile, hits in activity.hottest()
        ],
    }


def _print(activity: Activity) -> None:
    print_line(_summary(activity))
    print_line()
    print_table(*_nodes(activity), numeric=_NODE_NUMBERS)
    print_line()
    print_table(*_hottest(activity), numeric=_KEY_NUMBERS)


def _screen(activity: Activity, width: int) -> "Group":
    """The screen for a terminal of `width` columns; a narrow one shows fewer columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(shown(_summary(activity))), Text()]
    for (columns, rows), numeric in (
        (_nodes(activity), _NODE_NUMBERS),
        (_hottest(activity), _KEY_NUMBERS),
    ):
        kept = [i for i, name in enumerate(columns) if width >= _WIDE or name not in _FOR_WIDE]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in (columns[i] for i in kept):
            right = name in numeric
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(shown(row[i])) for i in kept))
        parts += [table, Text()]
    return Group(*parts)


def _summary(activity: Activity) -> str:
    counted, seconds = activity.of_all(), activity.seconds
    hits = sum(counted[name] for name in _HITS)
    reasons = {
        name.removeprefix("misses_"): count
        for name, count in counted.items()
        if name.startswith("misses_") and count
    }
    misses = sum(reasons.values())
    alive = sum(map(activity.alive, activity.last.beats))
    found = f"{hits / (hits + misses):.0%}" if hits + misses else "-"
    named = ", ".join(f"{why} {n / seconds:.1f}" for why, n in Counter(reasons).most_common(3))
    return (
        f"{alive} of {len(activity.last.beats)} nodes live; {hits / seconds:.1f} hits and "
        f"{misses / seconds:.1f} misses a second{f' ({named})' if named else ''}, hit rate {found}"
    )


def _nodes(activity: Activity) -> tuple[list[str], list[list[str]]]:
    rows = []
    for node in sorted(activity.last.beats):
        counted, info = activity.of_node(node), activity.last.infos.get(node)
        misses = sum(n for name, n in counted.items() if name.startswith("misses_"))
        rows.append(
            [
                node,
                "yes" if activity.alive(node) else "no",
                str(info.items) if info else "-",
                size_text(info.used_bytes) if info else "-",
                size_text(info.capacity_bytes) if info else "-",
                f"{sum(counted[name] for name in _HITS) / activity.seconds:.1f}",
                f"{misses / activity.seconds:.1f}",
                size_text(counted["bytes_fetched"] / activity.seconds),
            ]
        )
    return ["NODE", "ALIVE", *_NODE_NUMBERS], rows


def _hottest(activity: Activity) -> tuple[list[str], list[list[str]]]:
    rows = [
        [space[:8], f"{meanwhile / activity.seconds:.1f}", str(hits), key]
        for (space, key), meanwhile, hits in activity.hottest()
    ]
    return ["SPACE", *_KEY_NUMBERS, "KEY"], rows
