"""The demo's result for a terminal, as rich renderables and lines. Pure: it prints nothing."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from examples.demo.outcome import KeyFacts, Origin, Outcome, Promise, Purpose, Result

_TOKENS_SHOWN = 3
_HEX_SHOWN = 12


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def describe(outcome: Outcome) -> str:
    """One line for one outcome, shown while the demo runs."""
    return (
        f"  {outcome.purpose}: {outcome.photograph} to {outcome.engine}: "
        f"{_encoding_text(outcome)}, first token after {milliseconds(outcome.ttft_seconds)}"
    )


def summary(result: Result, promises: Sequence[Promise]) -> list[RenderableType]:
    """What is printed at the end, from top to bottom."""
    return [
        _request_table(result.outcomes),
        Text(_legend(result)),
        _record_table(result.records),
        Text("hits: how often a node delivered it to an engine; vLLM's own cache needs no node.\n"),
        _promise_table(promises),
    ]


def _table(title: str) -> Table:
    # No frame: it would take a quarter of 80 columns.
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _encoding_text(outcome: Outcome) -> str:
    """How the engine got the encoding of the image."""
    if outcome.origin is Origin.LOADED:
        return f"loaded: {outcome.source}"
    return str(outcome.origin)


def _request_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Requests, in their order")
    for heading in ("request", "photo", "engine", "image encoding"):
        table.add_column(heading)
    table.add_column("first token", justify="right")
    table.add_column("tokens", no_wrap=True)
    table.add_column("equal")
    for outcome in outcomes:
        tokens = " ".join(map(str, outcome.tokens[:_TOKENS_SHOWN])) + "…"
        table.add_row(
            str(outcome.purpose),
            outcome.photograph,
            outcome.engine,
            _encoding_text(outcome),
            milliseconds(outcome.ttft_seconds),
            tokens,
            "yes" if outcome.tokens_equal else "[red]NO[/red]",
            style=_style(outcome),
        )
    return table


def _style(outcome: Outcome) -> str | None:
    if outcome.purpose is Purpose.WARM_UP:
        return "dim"
    return "bold" if outcome.origin is Origin.ENCODED else None


def _legend(result: Result) -> str:
    lines = [
        "first token: time from queued to first token, by the clock of vLLM's engine.",
        "equal: to the tokens of an engine without a connector.",
        "warm-up: each engine's first photograph and its repeats, slow on a new engine; of the "
        "promises below they count only for those about tokens.",
    ]
    at_once = [o for o in result.outcomes if o.purpose is Purpose.AT_ONCE]
    if at_once and all(outcome.origin is Origin.ENCODED for outcome in at_once):
        lines.append(
            "both at once: both engines encoded it; without a fault, one encodes for the whole "
            "fleet and the other waits."
        )
    lines.append(
        f"Images encoded, as vLLM's schedulers counted: {_counts(result.encoder_runs)} "
        f"(and to warm up: {_counts(result.encoder_runs_of_warm_up)}).\n"
    )
    return "\n".join(lines)


def _counts(runs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in runs.items())


def _record_table(records: Sequence[KeyFacts]) -> Table:
    namespaces = sorted({record.namespace[:_HEX_SHOWN] for record in records})
    shown = ", ".join(f"{namespace}…" for namespace in namespaces)
    table = _table(f"Records in Redis, namespace {shown}")
    for heading in ("photo", "key", "tensor"):
        table.add_column(heading)
    table.add_column("size", justify="right")
    table.add_column("held by")
    table.add_column("hits", justify="right")
    for record in records:
        shape = " × ".join(map(str, record.shape))
        table.add_row(
            record.photograph or "?",
            f"{record.key[:_HEX_SHOWN]}…",
            f"{record.dtype} {shape}",
            f"{record.nbytes / 1e6:.1f} MB",
            ", ".join(record.nodes),
            str(record.hits),
        )
    return table


def _promise_table(promises: Sequence[Promise]) -> Table:
    table = _table("What the demo promises")
    table.add_column("promise")
    table.add_column("found")
    table.add_column("kept")
    for promise in promises:
        table.add_row(promise.text, promise.found, _kept(promise))
    return table


def _kept(promise: Promise) -> str:
    if promise.kept:
        return "yes"
    return "[yellow]missed[/yellow]" if promise.is_time else "[red]NO[/red]"


def verdict(promises: Sequence[Promise]) -> list[str]:
    """One line, with rich's markup, for each broken promise."""
    return [
        f"{'[yellow]Time missed' if promise.is_time else '[red]Not kept'}:[/] "
        f"{promise.text} ({promise.found})"
        for promise in promises
        if not promise.kept
    ]
