"""`lookup-buffer invalidate NAMESPACE`: every node drops its items of the namespace.

Marks the namespace as invalid, removes its records, waits for heartbeats of all nodes, removes the
records that were written meanwhile, and reads the mark back: the nodes may not have found it. That
it is still there shows that they have, unless somebody who may write the store hid it meanwhile.
Runs on the main thread; blocks on the store only.
"""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import click

from lookup_buffer.cli.options import of_store, store_access
from lookup_buffer.cli.output import print_json, print_line
from lookup_buffer.inspection.access import CommandError, ExitCode, opened_store
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.protocol.fields import is_fingerprint
from store import INVALIDATIONS_MAX, BlockingStore, Invalidation

BEATS = 2
"""Heartbeats to wait for: a node that has sent so many since the mark was set has read the mark."""


@click.command()
@click.argument("namespace")
@of_store
def invalidate(
    namespace: str,
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Drop all items of a namespace, everywhere.

    NAMESPACE is a fingerprint; its beginning is enough.

    For engines whose outputs are wrong. What an engine inserts later stays, so stop such engines
    first. The exit code is 1 if a node does not answer: it drops its items when it is back. It is 1
    as well if the mark that orders it did not stay in the store; the command then says what to do.
    """
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "invalidate") as store:
        space = _only_namespace(store, namespace)
        mark = Invalidation(secrets.token_hex(8), int(time.time()))
        store.mark_invalid(space, mark)
        count = store.clear(space)
        silent: set[str] = set()
        for _ in range(BEATS):
            monitor = store.run(HeartbeatMonitor.begin(store.store))
            store.run(monitor.wait())
            silent |= {node for node, beat in monitor.last.items() if not monitor.alive(node)}
        count += store.clear(space)  # records that a node wrote before it read the mark
        _require(mark, space, store.invalidations())
    if json:
        print_json({"namespace": space, "records": count, "silent_nodes": sorted(silent)})
    else:
        kept = f"the mark was still there after {BEATS} beats of every live node"
        print_line(f"namespace {space}: {count} records removed; {kept}")
        for node in sorted(silent):
            print_line(f"node {node} is silent: it drops its items when it is back")
    if silent:
        raise click.exceptions.Exit(ExitCode.FOUND)


def _require(mark: Invalidation, namespace: str, found: Mapping[str, Invalidation]) -> None:
    """Raise CommandError unless nodes that read what was `found` have read `mark`."""
    if found.get(namespace) == mark and len(found) < INVALIDATIONS_MAX:
        return
    raise CommandError(
        f"the mark of namespace {namespace} did not stay in the store, or is not one of the "
        f"{INVALIDATIONS_MAX} that nodes read: those that have not read it keep their items; "
        "remove lb:invalid from the store and invalidate again",
        ExitCode.FOUND,
    )


def _only_namespace(store: BlockingStore, beginning: str) -> str:
    """The namespace that begins with `beginning`: a described one, or any complete fingerprint,
    which no description can change.

    Raises:
        CommandError: no namespace begins with it, or several do.
    """
    if is_fingerprint(beginning):
        return beginning
    found = sorted(name for name in store.namespaces() if name.startswith(beginning))
    if beginning in found:
        return beginning
    if not found:
        raise CommandError(f"there is no namespace that begins with {beginning!r}", ExitCode.FOUND)
    if len(found) > 1 or not beginning:
        named = ", ".join(name[:16] for name in found[:5])
        raise CommandError(
            f"{len(found)} namespaces begin with {beginning!r}: {named}", ExitCode.USAGE
        )
    return found[0]
