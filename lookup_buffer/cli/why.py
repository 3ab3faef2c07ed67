"""`lookup-buffer why KEY`: why a key is a miss, in sentences, and what to do about it.

Prints the findings of `lookup_buffer.inspection`. Reads the store only, on the main thread.
"""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from lookup_buffer.cli.options import of_namespace, of_store, store_access
from lookup_buffer.cli.output import print_fields, print_json, print_line, print_outline, shown
from lookup_buffer.inspection.access import ExitCode, opened_store
from lookup_buffer.inspection.findings import IN_PROGRESS, PRESENT, Finding
from lookup_buffer.inspection.history import History, history_of


@click.command()
@click.argument("key")
@of_namespace
@of_store
def why(
    key: str,
    namespace: str | None,
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Explain why a key is a miss, and what to do about it.

    KEY is a key, or a part of one.

    Searches all namespaces, unless --namespace chooses one: then it also shows where else the key
    is, and in which parts the two namespaces differ. The exit code is 0 if the key is stored on an
    alive node.
    """
    access = store_access(store_url, store_password_file, directory)
    with opened_store(access, "why") as store:
        history = store.run(history_of(store.browsed, key, namespace or ""))
    findings = list(history.findings())
    found = any(one.code in PRESENT for one in findings)
    if json:
        listed = [asdict(one) for one in findings]
        print_json({"key": history.key, "found": found, "findings": listed})
    else:
        _print(history, findings)
    if not found:
        raise click.exceptions.Exit(ExitCode.FOUND)


def _print(history: History, findings: list[Finding]) -> None:
    print_fields({"key": history.key})
    for space, group in groupby(findings, key=lambda one: one.namespace):
        print_line()
        if space is not None:
            print_fields({"namespace": space})
        print_outline(
            [
                (_mark(one), "", "\n-> ".join(map(shown, filter(None, (one.sentence, one.hint)))))
                for one in group
            ]
        )


def _mark(finding: Finding) -> tuple[str, str]:
    if finding.code in PRESENT:
        return "+", "green"
    if finding.code in IN_PROGRESS:
        return "~", "yellow"
    return "-", "bold red"
