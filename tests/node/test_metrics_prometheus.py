"""A real Prometheus scrapes real nodes; the rules and the dashboard are run on it."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodes import MIB, NodeProcess, StartNode, key, tensor_of, wait_until
from observing import get, samples
from patience import scaled
from servers import free_port

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
DASHBOARD = ROOT / "deploy/grafana/lookup-buffer.json"
START_SECONDS = scaled(30.0)
OF_PROMETHEUS = {"up"}


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on the PATH (make system-packages installs one)")
    return found


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _queries() -> dict[str, str]:
    """Every expression of the dashboard, with its variables filled in, by panel and letter."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "1m")
        .replace("$instance", ".*")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


def _named(expression: str) -> set[str]:
    """The metrics in a PromQL expression of ours, which all have a prefix, or are `up`."""
    return set(re.findall(r"\b(?:lookup_buffer|process)_[a-z_]+|\bup\b(?=[{ ])", expression))


@dataclass
class Prometheus:
    url: str
    nodes: list[NodeProcess]

    def ask(self, path: str, **arguments: str) -> Any:
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=10.0) as answer:
                document = json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            if refused.code == 503:
                raise  # it is starting
            with refused:
                raise AssertionError(refused.read().decode()) from refused
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.ask("/api/v1/query", query=expression)["result"]
        return result

    def up(self) -> bool:
        try:
            return len(self.query('up{job="lookup-buffer"} == 1')) == len(self.nodes)
        except OSError:
            return False


@pytest.fixture(scope="module")
def prometheus(
    module_nodes: StartNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """It scrapes two nodes, which were used, each second; one of them wants a token."""
    program = _program("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "token").write_text("for-prometheus-alone")
    pair = [
        module_nodes(http_listen=f"http://127.0.0.1:{free_port()}"),
        module_nodes(
            http_listen=f"http://127.0.0.1:{free_port()}", http_token="for-prometheus-alone"
        ),
    ]
    for node in pair:  # their dashboards' processes are the module's, not a test's
        wait_until(lambda node=node: get(node, "/healthz")[0] == 200, 10.0)  # type: ignore[misc]
    (directory / "prometheus.yml").write_text(_configuration(pair, directory))
    port = free_port()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        running = Prometheus(f"http://127.0.0.1:{port}", pair)
        wait_until(running.up, START_SECONDS, (directory / "log").read_text())
        _use(pair)
        yield running
    finally:
        process.terminate()
        process.wait(20.0)


def _configuration(pair: list[NodeProcess], directory: Path) -> str:
    """The example, for these nodes and each second."""
    example = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    example["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    example["rule_files"] = [str(RULES)]
    (job,) = example["scrape_configs"]
    targets = [str(node.settings.http_listen).removeprefix("http://") for node in pair]
    job["static_configs"] = [{"targets": targets}]
    job["authorization"] = {"credentials_file": str(directory / "token")}
    text: str = yaml.safe_dump(example)
    return text


def _use(pair: list[NodeProcess]) -> None:
    first, second = pair
    with first.client() as here, second.client() as there:
        for _ in range(3):
            name = key()
            here.insert(name, tensor_of("seen", MIB))
            there.select(name, timeout=5.0)


def test_it_scrapes_the_counters_of_the_nodes(prometheus: Prometheus) -> None:
    expression = 'sum(lookup_buffer_hits_total{source="remote"})'
    wait_until(
        lambda: [each["value"][1] for each in prometheus.query(expression)] == ["3"],
        20.0,
        "the hits arrive",
    )
    (fetched,) = prometheus.query("sum(lookup_buffer_fetch_seconds_count)")
    assert fetched["value"][1] == "3"
    built = prometheus.query("lookup_buffer_build_info")
    names = {node.node_id for node in prometheus.nodes}
    assert {each["metric"]["node"] for each in built} == names


def test_every_query_of_the_dashboard_is_answered(prometheus: Prometheus) -> None:
    """None fails, and each has something to show."""

    def empty() -> set[str]:
        return {name for name, text in _queries().items() if not prometheus.query(text)}

    wait_until(lambda: not empty(), 30.0, f"nothing to show: {empty()}")


def test_every_rule_is_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = prometheus.ask("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in evaluated()), 20.0)
    assert {rule["name"] for rule in evaluated()} == {rule["alert"] for rule in _rules()}
    assert {rule["state"] for rule in evaluated()} == {"inactive"}


def test_every_metric_of_dashboard_and_rules_exists(prometheus: Prometheus) -> None:
    exposed = {name for name, _ in samples(prometheus.nodes[0])}
    texts = [*_queries().values(), *(rule["expr"] for rule in _rules())]
    named = set().union(*map(_named, texts))
    assert "lookup_buffer_hits_total" in named
    assert named - OF_PROMETHEUS <= exposed
    examples = (ROOT / "docs/metrics.md").read_text().partition("in PromQL\n")[2]
    expressions = re.findall(r"\| `(.+)` \|$", examples, flags=re.MULTILINE)
    assert len(expressions) >= 6
    for expression in expressions:
        assert prometheus.query(expression), expression


def test_no_two_panels_lie_on_each_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    squares = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(squares) == len(set(squares))
    assert max(x for x, _ in squares) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_promtool_finds_nothing_wrong(prometheus: Prometheus) -> None:
    promtool = _program("promtool")
    page = get(prometheus.nodes[0], "/metrics")[2]
    for arguments, text in (
        (["check", "metrics"], page),
        (["check", "config", str(ROOT / "deploy/prometheus/prometheus.yml")], None),
        (["check", "rules", "--lint-fatal", str(RULES)], None),
        (["test", "rules", str(ROOT / "tests/node/prometheus_rules.yml")], None),
    ):
        done = subprocess.run(
            [promtool, *arguments], input=text, capture_output=True, text=True, timeout=scaled(60),
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
