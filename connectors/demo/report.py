"""Shows the demo's result in a terminal. Pure: builds tables, prints nothing."""

from collections.abc import Sequence

from rich.table import Table

from connectors.demo.outcome import KeyFacts, Origin, Outcome, Promise

_TOKENS_SHOWN = 4
_HEX_SHOWN = 12


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def describe(outcome: Outcome) -> str:
    """One line, told while the demo runs."""
    origin = f"{outcome.origin} from {outcome.source}" if outcome.source else str(outcome.origin)
    return (
        f"{outcome.purpose}: {outcome.photograph} to {outcome.engine}: {origin}, "
        f"first token after {milliseconds(outcome.ttft_seconds)}"
    )


def request_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        title="Requests: time from queued to first token, tokens as without a connector",
        title_justify="left",
    )
    for heading in ("request", "photograph", "engine", "encoding", "from"):
        table.add_column(heading)
    table.add_column("first token", justify="right")
    table.add_column("tokens")
    table.add_column("as without")
    for outcome in outcomes:
        style = "bold" if outcome.origin is Origin.ENCODED else None
        tokens = " ".join(map(str, outcome.tokens[:_TOKENS_SHOWN])) + " …"
        table.add_row(
            str(outcome.purpose),
            outcome.photograph,
            outcome.engine,
            str(outcome.origin),
            outcome.source or "–",
            milliseconds(outcome.ttft_seconds),
            tokens,
            "yes" if outcome.tokens_equal else "[red]NO[/red]",
            style=style,
        )
    return table


def record_table(records: Sequence[KeyFacts]) -> Table:
    table = Table(title="As it stands in Redis", title_justify="left")
    for heading in ("key", "namespace", "tensor"):
        table.add_column(heading)
    table.add_column("size", justify="right")
    table.add_column("held by")
    table.add_column("hits", justify="right")
    for record in records:
        shape = " × ".join(map(str, record.shape))
        table.add_row(
            f"{record.key[:_HEX_SHOWN]}…",
            f"{record.namespace[:_HEX_SHOWN]}…",
            f"{record.dtype} {shape}",
            f"{record.nbytes / 1e6:.1f} MB",
            ", ".join(record.nodes),
            str(record.hits),
        )
    return table


def promise_table(promises: Sequence[Promise]) -> Table:
    table = Table(title="What the demo promises", title_justify="left")
    table.add_column("promise")
    table.add_column("found")
    table.add_column("kept")
    for promise in promises:
        kept = "yes" if promise.kept else "[red]NO[/red]"
        table.add_row(promise.text, promise.found, kept)
    return table
