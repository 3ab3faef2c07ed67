"""The calls that the host matrix looks for in a release are found, and misfits are reported."""

from pathlib import Path
from typing import Any

import pytest

from host_checks import Use, refused_parameters, uses


class Base:
    def load(self, encoder_cache: Any, **kwargs: Any) -> None: ...

    def ask(self, request: Any, computed: int) -> bool:
        return False


class Ours(Base):
    def load(self, encoder_cache: Any, **kwargs: Any) -> None: ...

    def ask(self, request: Any, computed: int) -> bool:
        return False


def test_every_way_in_which_a_host_calls_its_connector_is_found(tmp_path: Path) -> None:
    worker = tmp_path / "vllm/v1/worker"
    (worker / "gpu").mkdir(parents=True)
    (worker / "runner.py").write_text(
        "def run(self, cache, more):\n"
        "    connector = get_ec_transfer()\n"
        "    connector.load(encoder_cache=cache)\n"
        "    get_ec_transfer().close()\n"
        "    if self.ec_connector.is_producer:\n"
        "        self.ec_connector.ask(more, 1)\n"
        "    ec_connector.load(cache, **more)\n"
        "    self.ec_connector.no_forward(cache)\n"
        "    self.connector.not_ours()\n"
    )
    (worker / "gpu/ec_connector.py").write_text("def no_forward(self, cache): ...\n")
    own = tmp_path / "vllm/distributed/ec_transfer/ec_connector"
    own.mkdir(parents=True)
    (own / "other.py").write_text("ec_connector.not_ours()\n")
    where = "vllm/v1/worker/runner.py"
    assert sorted(uses(tmp_path, Base), key=lambda use: use.where) == [
        Use(f"{where}:3", "load", 0, ("encoder_cache",), is_call=True),
        Use(f"{where}:4", "close", is_call=True),
        Use(f"{where}:5", "is_producer"),
        Use(f"{where}:6", "ask", 2, is_call=True),
        Use(f"{where}:7", "load", 1, is_call=True),
    ]


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (Use("here", "ask", 2, is_call=True), None),
        (Use("here", "load", 0, ("encoder_cache", "more"), is_call=True), None),
        (Use("here", "ask", 1, is_call=True), "missing a required argument"),
        (Use("here", "ask", 1, ("tokens",), is_call=True), "missing a required argument"),
        (Use("here", "ask", 3, is_call=True), "too many positional arguments"),
        (Use("here", "close", is_call=True), "does not exist"),
        (Use("here", "is_producer"), "does not exist"),
    ],
)
def test_a_use_that_would_fail_is_reported(use: Use, complaint: str | None) -> None:
    refused = use.refused_by(Ours)
    assert (refused is None) if complaint is None else complaint in str(refused)


def test_parameters_have_the_names_of_the_host() -> None:
    class Renamed(Base):
        def ask(self, request: Any, tokens: int) -> bool:
            return False

    class Closed(Base):
        def load(self, encoder_cache: Any) -> None: ...  # type: ignore[override]

    assert refused_parameters(Base, Ours) == []
    (refused,) = refused_parameters(Base, Renamed)
    assert refused.startswith("ask: ")
    assert refused_parameters(Base, Closed) == ["load: the host may pass more by keyword"]
