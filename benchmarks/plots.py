"""Charts as SVG, for light and dark pages: lines, bars, ranges."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 72, 36, 48, 96
"""Margins around the plot: axis numbers and labels, title, legend."""
TICKS = 5

# With its own background: readable on any page, light or dark.
STYLE = """
  .paper { fill: #ffffff } .ink { fill: #24292f } .rule { stroke: #d0d7de }
  .s0 { --c: #0969da } .s1 { --c: #bc4c00 } .s2 { --c: #1a7f37 } .s3 { --c: #8250df }
  .line { fill: none; stroke: var(--c); stroke-width: 2 } .dot { fill: var(--c) }
  .goal { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 6 4 } .goaltext { fill: #cf222e }
  text { font: 12px system-ui, sans-serif } .title { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .rule { stroke: #30363d }
    .s0 { --c: #58a6ff } .s1 { --c: #f0883e } .s2 { --c: #3fb950 } .s3 { --c: #bc8cff }
    .goal { stroke: #ff7b72 } .goaltext { fill: #ff7b72 }
  }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    value: float
    label: str


Series = dict[str, Sequence[tuple[float, float]]]
Range = Sequence[float]
"""A value, and the bounds of its confidence interval."""


def lines(title: str, x: Axis, y: Axis, series: Series, goal: Goal | None = None) -> str:
    """A chart of lines; the vertical axis begins at 0 unless it is logarithmic."""
    points = [point for line in series.values() for point in line]
    across = sorted({point[0] for point in points})
    high = max([point[1] for point in points] + ([goal.value] if goal else []))
    low = min(point[1] for point in points)
    x_of = scale(across[0], across[-1], LEFT, WIDTH - RIGHT, x.logarithmic)
    ticks = powers(low, high) if y.logarithmic else evenly(high)
    y_of = scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, y.logarithmic)
    parts = [*axes(title, x.label, y.label)]
    for value in ticks:
        parts += level(y_of(value), number(value))
    for value in across:
        parts.append(text(x_of(value), HEIGHT - BOTTOM + 18, number(value), "middle"))
    if goal is not None:
        at = y_of(goal.value)
        parts.append(
            f'<line class="goal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(text(LEFT + 4, at - 5, goal.label, "start", "goaltext"))
    for index, line in enumerate(series.values()):
        path = " ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in line)
        parts.append(f'<g class="s{index}"><polyline class="line" points="{path}"/>')
        parts += [
            f'<circle class="dot" cx="{x_of(a):.1f}" cy="{y_of(b):.1f}" r="3.5"/>' for a, b in line
        ]
        parts.append("</g>")
    return document(title, [*parts, *legend(list(series))])


def bars(title: str, label: str, values: dict[str, float], goal: Goal) -> str:
    """Horizontal bars on a logarithmic axis, each with its number."""
    left, step = 250, (HEIGHT - TOP - BOTTOM) / len(values)
    ticks = powers(min(values.values()), max([*values.values(), goal.value]))
    x_of = scale(ticks[0], ticks[-1], left, WIDTH - RIGHT - 44, logarithmic=True)
    parts = [text(WIDTH / 2, 24, title, "middle", "ink title")]
    for tick in ticks:
        at = x_of(tick)
        parts.append(upright("rule", at))
        parts.append(text(at, HEIGHT - BOTTOM + 18, number(tick), "middle"))
    for index, (name, value) in enumerate(values.items()):
        top = TOP + index * step
        parts.append(
            f'<g class="s0"><rect class="dot" x="{left}" y="{top + step * 0.2:.1f}" '
            f'width="{x_of(value) - left:.1f}" height="{step * 0.6:.1f}"/></g>'
        )
        parts.append(text(left - 8, top + step / 2 + 4, name, "end"))
        parts.append(text(x_of(value) + 5, top + step / 2 + 4, f"{value:.2f}", "start"))
    at = x_of(goal.value)
    parts.append(upright("goal", at))
    parts.append(text(at, HEIGHT - BOTTOM + 36, goal.label, "middle", "goaltext"))
    parts.append(text((left + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 58, label, "middle"))
    return document(title, parts)


def ranges(title: str, label: str, rows: dict[str, dict[str, Range]], goal: Goal) -> str:
    """In each row a point for each series, with its confidence interval; from 0."""
    series = list(next(iter(rows.values())))
    values = [value for row in rows.values() for each in row.values() for value in each]
    left, step = 150, (HEIGHT - TOP - BOTTOM) / len(rows)
    ticks = evenly(max([*values, goal.value]))
    x_of = scale(ticks[0], ticks[-1], left, WIDTH - RIGHT, logarithmic=False)
    parts = [text(WIDTH / 2, 24, title, "middle", "ink title")]
    for tick in ticks:
        parts.append(upright("rule", x_of(tick)))
        parts.append(text(x_of(tick), HEIGHT - BOTTOM + 18, number(tick), "middle"))
    for index, (name, row) in enumerate(rows.items()):
        top = TOP + index * step
        parts.append(text(left - 8, top + step / 2 + 4, name, "end"))
        for at, (value, low, high) in enumerate(row.values()):
            y = top + step * (at + 1) / (len(series) + 1)
            parts.append(
                f'<g class="s{at}"><line class="line" x1="{x_of(low):.1f}" x2="{x_of(high):.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<circle class="dot" cx="{x_of(value):.1f}" cy="{y:.1f}" r="4"/></g>'
            )
            parts.append(text(x_of(high) + 6, y + 4, f"{value:.3g}", "start"))
    parts.append(upright("goal", x_of(goal.value)))
    parts.append(text((left + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 42, label, "middle"))
    return document(title, [*parts, *legend(series)])


def upright(kind: str, at: float) -> str:
    return f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def axes(title: str, across: str, up: str) -> Iterator[str]:
    yield text(WIDTH / 2, 24, title, "middle", "ink title")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 40, across, "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text class="ink" text-anchor="middle" transform="translate(16 {middle:.1f}) '
        f'rotate(-90)">{escape(up)}</text>'
    )


def level(at: float, label: str) -> list[str]:
    rule = f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return [rule, text(LEFT - 8, at + 4, label, "end")]


def legend(names: Sequence[str]) -> Iterator[str]:
    width = (WIDTH - LEFT) / len(names)
    for index, name in enumerate(names):
        at = LEFT + index * width
        dot = f'<circle class="dot" cx="{at:.1f}" cy="{HEIGHT - 20}" r="5"/>'
        yield f'<g class="s{index}">{dot}</g>'
        yield text(at + 10, HEIGHT - 16, name, "start")


def text(x: float, y: float, words: str, anchor: str, kind: str = "ink") -> str:
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {position}>{escape(words)}</text>'


def document(title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    paper = f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    body = "\n".join(parts)
    return (
        f"{head}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{paper}\n{body}\n</svg>\n"
    )


def scale(
    low: float, high: float, start: float, end: float, logarithmic: bool
) -> Callable[[float], float]:
    """From values to positions."""
    bend = math.log10 if logarithmic else float
    first, span = bend(low), (bend(high) - bend(low)) or 1.0
    return lambda value: start + (bend(value) - first) / span * (end - start)


def evenly(high: float) -> list[float]:
    """Round numbers from 0 to beyond `high`."""
    rough = high / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def powers(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.6g}"
