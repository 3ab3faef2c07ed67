"""docs/vllm.md states for each setting whether it separates engines, and why."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.ec.stats import FAMILIES as EC_FAMILIES
from connectors.kv.engine import KvSettings, kv_identity
from connectors.kv.stats import FAMILIES as KV_FAMILIES
from connectors.namespace import (
    IGNORED_LORA,
    IGNORED_MODEL,
    IGNORED_MULTIMODAL,
    Ignored,
    namespace_parts,
)
from connectors.settings import ConnectorSettings, SharedSettings, parse_settings
from lookup_buffer.config import SECRETS
from lookup_buffer.environment import parse_bytes
from nodes import ROOT
from test_engine_namespace import SETTINGS, vllm_config
from test_kv_start import BLOCK, config

TEXT = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("### What decides whether two engines share")[2].partition("\n## ")[0]
ROWS = {
    cells[0]: cells[1:]
    for line in SECTION.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 4
}
FIELDS = [*IGNORED_MODEL.items(), *IGNORED_MULTIMODAL.items(), *IGNORED_LORA.items()]


def rows_of(title: str) -> set[str]:
    """The settings in the table of a section."""
    section = TEXT.partition(f"# {title}\n")[2].partition("\n#")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def _rows(title: str, level: str = "##") -> list[list[str]]:
    """The cells of the first table under a heading of docs/vllm.md, without its head."""
    section = TEXT.partition(f"\n{level} {title}\n")[2].partition("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_setting_of_the_connector_is_explained_with_its_default() -> None:
    explained = {row[0].strip("`"): row[1].strip("`") for row in _rows("Settings")}
    fields = ConnectorSettings.model_fields
    assert explained.keys() == fields.keys() - SECRETS
    for name, field in fields.items():
        shown = explained.get(name, "")
        if name in SECRETS or shown.startswith("a "):
            continue  # worked out from another setting
        value = getattr(parse_settings({name: parse_bytes(shown)} if "iB" in shown else {}), name)
        assert value == field.default, name
        if "iB" not in shown:
            plain = str(field.default).lower() if isinstance(field.default, bool) else field.default
            assert shown in (str(plain), f"{plain:g}" if isinstance(plain, float) else ""), name


def test_every_metric_of_the_connector_is_explained() -> None:
    explained = {row[0].strip("`"): row[1].strip("`") for row in _rows("What you see")}
    assert explained == {f"{family.name}_total": family.label for family in EC_FAMILIES}


def test_the_settings_and_metrics_of_the_kv_connector_are_explained() -> None:
    metrics = {row[0].strip("`"): row[1].strip("`") for row in _rows("What you see of it", "###")}
    assert metrics == {f"{family.name}_total": family.label for family in KV_FAMILIES}
    own = {
        name
        for name, field in KvSettings.model_fields.items()
        if name not in SharedSettings.model_fields
        or field.default != SharedSettings.model_fields[name].default
    }
    assert {row[0].strip("`") for row in _rows("Settings of the KV connector", "###")} == own


def test_the_table_has_each_setting_of_the_ec_connector() -> None:
    """Except secrets, which are refused there."""
    assert rows_of("Settings") == ConnectorSettings.model_fields.keys() - set(SECRETS)


def test_the_kv_connector_takes_the_settings_of_the_table_but_those_named() -> None:
    named = re.search(r"\[below\]\(#settings\) except (.*?), and\n", TEXT, re.DOTALL)
    assert named is not None
    exceptions = [name.replace("*", ".*") for name in re.findall(r"`([\w*]+)`", named[1])]
    shared = {name for name in rows_of("Settings") if not fits_one(exceptions, name)}
    assert shared | rows_of("Settings of the KV connector") == (
        KvSettings.model_fields.keys() - set(SECRETS)
    )


def fits_one(patterns: list[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.mark.parametrize(("name", "ignored"), FIELDS, ids=[name for name, _ in FIELDS])
def test_each_field_that_does_not_count_has_a_row(name: str, ignored: Ignored) -> None:
    for_ec = "yes" if ignored.reason.startswith("counted in its own part") else "no"
    for_kv = "yes" if ignored.kv_counts else for_ec
    assert ROWS[f"`{name}`"] == [for_ec, for_kv, ignored.reason]


@pytest.mark.vllm
def test_each_field_of_this_vllm_has_a_row() -> None:
    """Also those that count."""
    from vllm.config import LoRAConfig, ModelConfig, MultiModalConfig

    kinds: list[tuple[Any, Any]] = [
        (ModelConfig, IGNORED_MODEL), (MultiModalConfig, IGNORED_MULTIMODAL),
        (LoRAConfig, IGNORED_LORA),
    ]  # fmt: skip
    for kind, ignored in kinds:
        names = {field.name for field in dataclasses.fields(kind)}
        assert ignored.keys() <= names, "a name that no field has"
        for name in names - ignored.keys():
            assert ROWS[f"`{name}`"][:2] == ["yes", "yes"]


def test_each_part_of_a_namespace_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = set(re.findall(r"`(\w+)`", SECTION)) | {"protocol", "weights"}
    assert namespace_parts(vllm_config(), SETTINGS).keys() <= parts
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")
    spec = SimpleNamespace(block_size=BLOCK)
    kv_parts = kv_identity(config(), KvSettings(weights_version="v"), spec).parts.keys()
    spelled = {"content", "vllm", "tensor_parallel_size", "layers", "kv_heads", "head_size"}
    spelled |= {"kv_cache_dtype", "block_size", "positions", "speculation"}
    assert kv_parts <= parts | spelled
