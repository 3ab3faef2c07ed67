"""An engine's KV cache at start: its namespace, and whether it can be shared."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from connectors.kv.engine import (
    KvSettings,
    kv_namespace_parts,
    parse_kv_settings,
    set_recompute_policy,
    validate_cache,
)
from connectors.kv.rank import engine_id, kv_shape
from lookup_buffer.errors import ConfigError
from test_engine_namespace import change, vllm_config

BLOCK = 32


def config(**transfer: Any) -> Any:
    made = vllm_config()
    model = made.model_config
    model.dtype, model.max_model_len = "bfloat16", 4096
    model.get_num_layers = lambda parallel: 24
    model.get_num_kv_heads = lambda parallel: 8 // parallel.tensor_parallel_size
    model.get_head_size = lambda: 64
    model.hf_text_config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    made.parallel_config = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, rank=0, data_parallel_index=0
    )
    made.cache_config.cache_dtype = "auto"
    made.speculative_config = None
    made.kv_transfer_config = SimpleNamespace(
        is_kv_producer=True, is_kv_consumer=True, engine_id="id", **transfer
    )
    return made


def parts(changed: Callable[[Any], None] | None = None, **settings: Any) -> dict[str, str]:
    made = config()
    if changed is not None:
        changed(made)
    spec = SimpleNamespace(block_size=settings.pop("block", BLOCK), **settings.pop("pages", {}))
    return kv_namespace_parts(made, KvSettings(**settings), spec)


def differing(other: dict[str, str]) -> set[str]:
    """What `lookup-buffer why` names for a look-up by an engine with these parts."""
    usual = parts()
    assert usual.keys() == other.keys()
    return {name for name in usual if usual[name] != other[name]}


APART: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "workers": (
        change("parallel_config.tensor_parallel_size", 2),
        {"tensor_parallel_size", "kv_heads"},
    ),
    "layers": (change("model_config.get_num_layers", lambda _: 12), {"layers"}),
    "head": (change("model_config.get_head_size", lambda: 128), {"head_size"}),
    "dtype": (change("model_config.dtype", "float32"), {"dtype"}),
    "the cache's dtype": (change("cache_config.cache_dtype", "fp8_e4m3"), {"kv_cache_dtype"}),
    "model": (change("model_config.model", "org/other"), {"model"}),
    "draft": (
        change("speculative_config", SimpleNamespace(method="eagle", model="org/draft")),
        {"speculation"},
    ),
}


@pytest.mark.parametrize("what", APART)
def test_engines_that_differ_share_nothing_and_the_difference_is_named(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")
    changed, expected = APART[what]
    assert differing(parts(changed)) == expected


def test_blocks_and_chunks_of_other_sizes_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")
    assert differing(parts(block=64)) == {"block_size"}
    assert differing(parts(chunk_tokens=256)) == {"chunk_tokens"}
    assert differing(parts(chunk_tokens=97)) == set(), "rounded up to whole blocks"
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "amx")
    assert differing(parts()) == set()
    here = parts()["kv_layout"]
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")
    assert parts()["kv_layout"] != here


def test_how_llama_4_scales_attention_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts of more than 8,191 tokens; vLLM decides it by their bound, and the generation
    config."""
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")

    def tuned(longest: int, own: dict[str, Any], override: dict[str, Any]) -> str:
        def choose(made: Any) -> None:
            model = made.model_config
            model.hf_text_config = SimpleNamespace(model_type="llama4_text")
            model.max_model_len = longest
            model.try_get_generation_config = lambda: own
            model.override_generation_config = override

        return parts(choose)["positions"]

    off, on = tuned(32768, {}, {}), tuned(65536, {}, {})
    name = "attn_temperature_tuning"
    assert off != on
    assert tuned(65536, {name: False}, {}) == tuned(65536, {name: True}, {name: False}) == off
    assert tuned(32768, {name: True}, {}) == on


@pytest.mark.parametrize(
    "text", [{"rope_parameters": {"rope_type": "longrope"}}, {"model_type": "llama4_text"}]
)
def test_a_longest_prompt_that_vllm_lowers_counts_as_the_layers_have_it(
    text: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `--max-model-len auto`: to what fits the cache, after it has built the layers."""
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")

    def positions(longest: int, original: int) -> str:
        def choose(made: Any) -> None:
            model = made.model_config
            model.hf_text_config = SimpleNamespace(**text)
            model.max_model_len, model.original_max_model_len = longest, original
            model.get_and_verify_max_len = lambda _: 131072
            model.try_get_generation_config = dict
            model.override_generation_config = {}

        return parts(choose)["positions"]

    assert positions(4096, -1) == positions(131072, 131072)
    assert positions(4096, -1) != positions(4096, 4096)


def test_backends_with_pages_of_their_own_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two heads a rank, pages of both kinds have one shape, and K and V are elsewhere."""
    monkeypatch.setattr("connectors.kv.engine._instructions", lambda *_: "vec")

    def choose(made: Any) -> None:
        made.attention_config = SimpleNamespace(
            backend=None, backend_per_kind={"full_attention": SimpleNamespace(name="B12X")}
        )

    assert differing(parts(choose)) == {"kv_layout"}
    own = {"num_head_slots": 2, "state_content_bytes": 256}
    assert differing(parts(pages=own)) == {"kv_layout"}
    assert differing(parts(pages=dict.fromkeys(own))) == set()


LONG_ROPE = {"rope_type": "longrope"}


@pytest.mark.parametrize(
    "rope",
    [LONG_ROPE, {"sliding_attention": {"rope_type": "default"}, "full_attention": LONG_ROPE}],
    ids=["all layers", "layers of one kind"],
)
def test_the_longest_prompt_counts_where_positions_depend_on_it(rope: dict[str, Any]) -> None:
    assert differing(parts(change("model_config.max_model_len", 8192))) == set()

    def stretched(length: int) -> dict[str, str]:
        def apply(made: Any) -> None:
            made.model_config.max_model_len = length
            made.model_config.hf_text_config.rope_parameters = rope

        return parts(apply)

    assert stretched(4096)["positions"] != stretched(8192)["positions"]


def test_nothing_else_than_the_engine_counts() -> None:
    assert parts() == parts(save_queue_items=7, capacity_bytes=1 << 26)
    assert parts()["content"] == "kv_cache"


# -- refusals


class FullAttentionSpec:
    block_size, page_size_bytes = BLOCK, 1000


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class BothWaysSpec(FullAttentionSpec):
    non_causal = True


def cache(*specs: type[FullAttentionSpec]) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec(), layer_names=["a", "b"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=4)


def test_a_plain_model_is_accepted() -> None:
    validate_cache(config(), cache(FullAttentionSpec))


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ((MLAAttentionSpec,), "MLA"),
        ((SlidingWindowSpec,), "SlidingWindowSpec"),
        ((FullAttentionSpec, SlidingWindowSpec), "hybrid"),
        ((BothWaysSpec,), "later tokens"),
        ((), "0 kinds"),
    ],
)
def test_models_with_other_kinds_of_kv_are_refused(specs: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate_cache(config(), cache(*specs))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context"),
        ("cache_config.calculate_kv_scales", True, "scales"),
        ("model_config.enable_sleep_mode", True, "sleep"),
        ("weight_transfer_config", object(), "weight"),
    ],
)
def test_engines_whose_kv_depends_on_more_than_tokens_are_refused(
    path: str, value: Any, says: str
) -> None:
    made = config()
    change(path, value)(made)
    with pytest.raises(ConfigError, match=says):
        validate_cache(made, cache(FullAttentionSpec))


def test_failed_loads_are_to_be_computed(caplog: pytest.LogCaptureFixture) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy="fail")
    set_recompute_policy(transfer)
    assert transfer.kv_load_failure_policy == "recompute"


def test_the_shape_of_the_cache() -> None:
    made = config()
    made.parallel_config.tensor_parallel_size = 2
    shape = kv_shape(made, cache(FullAttentionSpec), KvSettings(chunk_tokens=100))
    assert (shape.block_size, shape.chunk_tokens, shape.ranks) == (BLOCK, 4 * BLOCK, 2)
    assert shape.chunk_bytes == 4 * 1000 * 2 * 2
    assert shape.stores_generated
    made.speculative_config = object()
    shape = kv_shape(made, cache(FullAttentionSpec), KvSettings())
    assert not shape.stores_generated, "what was computed may be taken back"


def test_a_reader_stores_nothing() -> None:
    settings = parse_kv_settings({"read_only": True, "store_url": "redis://h:6379"})
    shape = kv_shape(config(), cache(FullAttentionSpec), settings)
    assert (shape.is_producer, shape.is_consumer) == (False, True)


def test_a_reader_takes_no_hand_off() -> None:
    with pytest.raises(ConfigError, match=r"'behind_router' is True.*allowed with it: False"):
        parse_kv_settings({"read_only": True, "store_url": "redis://h:6379", "behind_router": True})


def test_both_connectors_of_an_engine_have_separate_engine_ranks() -> None:
    assert engine_id(config()) == "id-kv"


def test_a_wrong_setting_is_named() -> None:
    for raw, says in (
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_token": 64}, "chunk_tokens"),
        ({"claim_wait_seconds": 1}, "claim_wait_seconds"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_kv_settings(raw)
