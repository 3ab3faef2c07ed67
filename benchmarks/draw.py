"""Draw the results of the benchmarks: benchmarks/results/*.json → *.svg in the same folder.

python -m benchmarks.draw
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plots import Axis, Goal, Series, bars, lines, ranges

RESULTS = Path(__file__).resolve().parent / "results"


def draw_scale(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ratios: Series = {}
    memory: Series = {}
    table: Series = {}
    for server in result["servers"]:
        for locations in (1, 3):
            ratios[f"{server['server']}, at {locations}"] = [
                (size["records"], size["locations"][locations - 1]["locate"]["ratio_to_1000"])
                for size in server["sizes"]
            ]
        memory[server["server"]] = [
            (entry["locations"], entry["bytes_a_record"])
            for entry in server["sizes"][-1]["locations"]
        ]
        table[server["server"]] = [
            (entry["trackers"], entry["bytes_a_key"]) for entry in server["tracking"]["bytes_a_key"]
        ]
    most = result["servers"][0]["sizes"][-1]["records"]
    yield (
        "scale-locate",
        lines(
            "Time to locate 32 random keys, by records (1 and 3 locations each)",
            Axis("records in the store", logarithmic=True),
            Axis("times that at 1,000 records"),
            ratios,
            Goal(1.2, "goal: 1.2"),
        ),
    )
    yield (
        "scale-memory",
        lines(
            f"Redis memory of a record, at {most:,} records",
            Axis("locations of a record"),
            Axis("bytes a record"),
            memory,
            Goal(600, "goal: 600 up to 3 locations"),
        ),
    )
    yield (
        "scale-tracking",
        lines(
            "Tracking table of the server: memory of a key",
            Axis("mirrors that have read the key"),
            Axis("bytes a key"),
            table,
        ),
    )


def draw_mirror(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    questions, client = result["questions"], result["has_caches"]
    values = {
        "node, known": questions["known"],
        "mirror, asked before": questions["mirror_warm"],
        "client, asked before": client["warm"],
        "mirror, never asked": questions["mirror_cold"],
        "store without a mirror": questions["store"],
        "client, never asked": client["cold"],
    }
    yield (
        "mirror-questions",
        bars(
            "Where are these 32 keys?",
            "times one redis-py MGET of 32 values (logarithmic)",
            {name: value["times_mget"] for name, value in values.items()},
            Goal(1.0, "one MGET"),
        ),
    )


def draw_fleet(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    points = result["by_nodes"]
    across = Axis("simulated nodes", logarithmic=True)

    def of(of_points: list[Any], by: str, *path: str) -> list[tuple[float, float]]:
        line = []
        for point in of_points:
            value = point
            for name in path:
                value = value[name]
            line.append((point[by], value))
        return line

    yield (
        "fleet-lag",
        lines(
            "Mirror lag at 1,000 publications a second",
            across,
            Axis("milliseconds (logarithmic)", logarithmic=True),
            {share: of(points, "nodes", "lag_ms", share) for share in ("p50", "p99")},
        ),
    )
    yield (
        "fleet-processor",
        lines(
            "Processor time at 1,000 publications a second in total",
            across,
            Axis("share of a core"),
            {
                "Redis": of(points, "nodes", "redis_processor"),
                "one node (mean)": of(points, "nodes", "node_processor_mean"),
            },
        ),
    )
    yield (
        "fleet-pushes",
        lines(
            "Invalidations at 1,000 publications a second in total",
            across,
            Axis("a second, all nodes together"),
            {
                "pushes": of(points, "nodes", "pushes_per_second"),
                "keys asked for": of(points, "nodes", "asked_keys_per_second"),
            },
        ),
    )
    same = [point for point in points if point["nodes"] == result["by_publishes"][0]["nodes"]]
    rates = sorted(
        same + result["by_publishes"], key=lambda point: float(point["published_per_second"])
    )
    yield (
        "fleet-publications",
        lines(
            f"Processor time by publications, {rates[0]['nodes']} nodes",
            Axis("publications a second, all nodes together"),
            Axis("share of a core"),
            {
                "Redis": of(rates, "published_per_second", "redis_processor"),
                "one node (mean)": of(rates, "published_per_second", "node_processor_mean"),
            },
        ),
    )


def draw_arrangements(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for encoder, measured in result["encoders"].items():
        rows = {}
        for reuse, cell in measured["reuse"].items():
            rows[f"{float(reuse):.0%} asked before"] = {
                name: cell[f"{name} against no connector"]["ttft_ratio"]
                for name in ("files on tmpfs", "lookup buffer")
            }
        yield (
            f"arrangements-{encoder}",
            ranges(
                f"Time to first token, {encoder} encoder, two engines on one host",
                "times that without a connector (mean, 95 %)",
                rows,
                Goal(1.0, "no connector"),
            ),
        )


def draw_network(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, items, title, goal in (
        ("network-items", 64, "64 items of 256 KiB from another host", 0.67),
        ("network-tensor", 1, "One item of 16 MiB from another host", 0.9),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for cell in result["results"]:
            if cell["items"] == items:
                rate = "1 Gbit/s" if cell["megabits"] else "no limit"
                lost = f", {cell['loss_percent']:g} % lost" if cell["loss_percent"] else ""
                point = (cell["round_trip_ms"], cell["speed_over_bare"])
                series.setdefault(rate + lost, []).append(point)
        yield (
            name,
            lines(
                title,
                Axis("round trip, milliseconds", logarithmic=True),
                Axis("speed, times that of a bare socket"),
                dict(series),
                Goal(goal, f"goal at 10 ms: {goal}"),
            ),
        )


DRAWINGS = {
    "store_scale": draw_scale,
    "store_mirror": draw_mirror,
    "store_fleet": draw_fleet,
    "arrangements": draw_arrangements,
    "network_matrix": draw_network,
}


def main() -> None:
    for name, draw in DRAWINGS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            print(f"not measured: {path.name}")
            continue
        result = json.loads(path.read_text())
        for drawing, svg in draw(result):
            (RESULTS / f"{drawing}.svg").write_text(svg)
            print(f"{drawing}.svg")


if __name__ == "__main__":
    main()
