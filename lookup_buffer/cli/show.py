"""`lookup-buffer show KEY`: one record in full, or the reason why there is none.

Reads the store only, on the main thread.
"""

import time
from pathlib import Path
from typing import Any

import click

from lookup_buffer.cli.options import of_namespace, of_store, store_access
from lookup_buffer.cli.output import print_fields, print_json, print_line, print_table
from lookup_buffer.inspection.access import (
    CommandError,
    ExitCode,
    opened_store,
)
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import (
    age_since,
    age_text,
    hits_of,
    nodes_of,
    size_text,
    tensor_text,
    to_json,
)
from lookup_buffer.key import is_handoff
from store import BlockingStore, Record
from store.record import SAFE_NAME

NAMED_WHEN_AMBIGUOUS = 5


@click.command()
@click.argument("key")
@of_namespace
@of_store
def show(
    key: str,
    namespace: str | None,
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Show one record in full, or why it is absent.

    KEY is a key, or the beginning of one.

    Shows each namespace that has the key, unless --namespace chooses one.
    """
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "show") as store:
        monitor = store.run(HeartbeatMonitor.begin(store.store))
        described = store.namespaces()
        spaces = {
            fingerprint: parts
            for fingerprint, parts in described.items()
            if fingerprint.startswith(namespace or "") and SAFE_NAME.match(fingerprint)
        }
        records = _find(store, key, namespace or "", sorted(spaces))
        gone = _reasons(store, key, sorted(spaces)) if not records else {}
        hits = hits_of(store, records)
        store.run(monitor.wait(nodes_of(records)))
    shown = [
        {
            **to_json(record, hits[record.namespace, record.key], monitor),
            "namespace_parts": spaces.get(record.namespace, {}),
        }
        for record in records
    ]
    if json:
        reasons = [{"namespace": space, "reason": reason} for space, reason in gone.items()]
        print_json({"key": key, "records": shown, "gone": reasons})
    else:
        for record, facts in zip(records, shown, strict=True):
            _print(record, facts)
    if not records:
        raise CommandError(f"{_absence(key, gone)}; see `lookup-buffer why`", ExitCode.FOUND)


def _find(store: BlockingStore, key: str, namespace: str, spaces: list[str]) -> list[Record]:
    """The records of `key`; without any, those of the only key that begins with it."""
    exact = [record for space in spaces for record in store.locate(space, [key]) if record]
    if exact:
        return exact
    # The beginning of a key, or a key in a namespace that has no description.
    addresses = sorted(
        {
            address
            for address in store.traces().find(key)
            if address[0].startswith(namespace) and address[1].startswith(key)
        }
    )
    found = {
        (record.namespace, record.key): record
        for record in store.look_up(addresses)
        if isinstance(record, Record)
    }
    keys = sorted({record.key for record in found.values()})
    if key in keys:
        keys = [key]
    if len(keys) > 1:
        named = ", ".join(keys[:NAMED_WHEN_AMBIGUOUS])
        more = ", …" if len(keys) > NAMED_WHEN_AMBIGUOUS else ""
        raise CommandError(f"{len(keys)} keys begin with {key!r}: {named}{more}", ExitCode.USAGE)
    return [found[address] for address in sorted(found) if address[1] in keys]


def _reasons(store: BlockingStore, key: str, spaces: list[str]) -> dict[str, str]:
    reasons = ((space, store.gone(space, key)) for space in spaces)
    return {space: reason for space, reason in reasons if reason is not None}


def _absence(key: str, gone: dict[str, str]) -> str:
    if not gone:
        ago = "a minute" if is_handoff(key) else "an hour"
        return f"no record of {key!r}: never published, expired, or removed over {ago} ago"
    reasons = ", ".join(f"{reason} (namespace {space[:8]})" for space, reason in gone.items())
    return (
        f"no record of {key!r} any more; its last copy was removed within the last hour: {reasons}"
    )


def _print(record: Record, facts: dict[str, Any]) -> None:
    created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    fields = {
        "key": record.key,
        "tensor": tensor_text(record),
        "size": f"{size_text(record.nbytes)} ({record.nbytes} bytes)",
        "hits": str(facts["hits"]),
        "created": f"{created} ({age_text(age_since(record.created))} ago)",
        **({"device": record.device} if record.device else {}),
        "namespace": record.namespace,
    }
    fields |= {f"  {name}": value for name, value in facts["namespace_parts"].items()}
    print_fields(fields)
    print_line()
    print_table(
        ["NODE", "ALIVE", "BOOT", "GENERATION", "CHECKSUM", "LANE"],
        [
            [
                copy["node"],
                "yes" if copy["alive"] else "no",
                copy["boot"],
                str(copy["generation"]),
                copy["checksum"] or "none: offered, no room yet",
                copy["lane"] or "-",
            ]
            for copy in facts["locations"]
        ],
        numeric=("GENERATION",),
    )
    print_line()
