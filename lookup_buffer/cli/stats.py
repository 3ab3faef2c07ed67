"""`lookup-buffer stats`: the counters of all nodes, as they were last flushed to the store.

Reads the store only, on the main thread.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click

from lookup_buffer.cli.options import of_store, store_access
from lookup_buffer.cli.output import print_json, print_line, print_table
from lookup_buffer.inspection.access import opened_store
from lookup_buffer.inspection.records import size_text

_TOTAL = "(all)"
_MISS_PREFIX = "misses_"
_BYTES = ("bytes_inserted", "bytes_fetched", "bytes_served")
_HITS = ("hits_local", "hits_remote", "hits_lane")
_ENCODES = ("encodes", "encode_milliseconds", "encodes_saved")


@click.command()
@of_store
def stats(
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Show hits, misses by reason, and bytes, of all nodes."""
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "stats") as store:
        counters = dict(sorted(store.stats().items()))
    totals: Counter[str] = Counter()
    for of_node in counters.values():
        totals.update(of_node)
    if json:
        document = {"nodes": counters, "totals": dict(sorted(totals.items()))}
        print_json({**document, "seconds_saved": _seconds_saved(totals)})
    elif not counters:
        print_line("no counters: no node has written any yet")
    else:
        _print(counters, totals)


def _print(counters: Mapping[str, Mapping[str, int]], totals: Counter[str]) -> None:
    rows = {**counters, _TOTAL: totals} if len(counters) > 1 else dict(counters)
    columns = ["HITS LOCAL", "REMOTE", "LANE", "MISSES", "INSERTED", "FETCHED", "SERVED"]
    print_table(
        ["NODE", *columns],
        [
            [
                node,
                *(str(of_node.get(name, 0)) for name in _HITS),
                str(sum(n for name, n in of_node.items() if name.startswith(_MISS_PREFIX))),
                *(size_text(of_node.get(name, 0)) for name in _BYTES),
            ]
            for node, of_node in rows.items()
        ],
        numeric=columns,
    )
    reasons = sorted(
        (-count, name.removeprefix(_MISS_PREFIX))
        for name, count in totals.items()
        if name.startswith(_MISS_PREFIX) and count
    )
    others = sorted(
        (name, count)
        for name, count in totals.items()
        if count and name not in (*_HITS, *_BYTES, *_ENCODES) and not name.startswith(_MISS_PREFIX)
    )
    if totals["encodes_saved"] or totals["encodes"]:
        print_line(_saved_text(totals))
    if reasons:
        print_line("misses: " + ", ".join(f"{reason} {-count}" for count, reason in reasons))
    if others:
        print_line("others: " + ", ".join(f"{name} {count}" for name, count in others))


def _seconds_saved(totals: Mapping[str, int]) -> float | None:
    """Estimated seconds of the saved encodes: their number times the mean of those that ran.

    None if no node has timed an encode.
    """
    encodes, milliseconds, saved = (totals.get(name, 0) for name in _ENCODES)
    return round(saved * milliseconds / encodes / 1e3, 3) if encodes else None


def _saved_text(totals: Mapping[str, int]) -> str:
    saved, seconds = totals["encodes_saved"], _seconds_saved(totals)
    if seconds is None:
        return f"encodes saved: {saved}"
    mean = totals["encode_milliseconds"] / totals["encodes"]
    return f"encodes saved: {saved}, about {seconds:.1f} s at {mean:.0f} ms each"
