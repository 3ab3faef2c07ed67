"""`lookup-buffer doctor`: check store, fleet, host and node, with advice for each problem.

Runs on the main thread. Network calls have timeouts. A failed check is a result, not an exception.
"""

from dataclasses import asdict
from pathlib import Path

import click

from lookup_buffer.cli.check import Check, Verdict
from lookup_buffer.cli.check_host import host_checks
from lookup_buffer.cli.check_store import store_checks
from lookup_buffer.cli.options import configure, of_store
from lookup_buffer.cli.output import print_json, print_outline
from lookup_buffer.inspection.access import ExitCode


@click.command()
@of_store
def doctor(
    store_url: str | None,
    store_password_file: Path | None,
    directory: Path | None,
    json: bool,
) -> None:
    """Check the store, this host and its node.

    Advises what to do about each problem. The exit code is 1 if a check fails.
    """
    config = configure(
        store_url=store_url, store_password_file=store_password_file, directory=directory
    )
    checks = [*store_checks(config), *host_checks(config)]
    failed = any(check.verdict is Verdict.FAIL for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    if failed:
        raise click.exceptions.Exit(ExitCode.FOUND)


def _print(checks: list[Check]) -> None:
    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    print_outline(
        [
            (
                (check.verdict.value, styles[check.verdict]),
                check.name,
                f"{check.found}\n-> {check.advice}" if check.advice else check.found,
            )
            for check in checks
        ]
    )
