"""Names of chunks: equal for equal prompts, and for nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_standins import Feature, Position
from connectors.identifiers import Adapters, NotShareable, mixes_adapters
from connectors.kv.chunks import ChunkChain
from nodes import wait_until

SIZE = 4
TOKENS = list(range(100, 121))


def names(tokens: list[int] = TOKENS, **request: Any) -> list[str]:
    return chain(**request).grow(tokens, 100)


def chain(*features: Feature, adapters: Adapters | None = None, **request: Any) -> ChunkChain:
    fields = {"request_id": "r", "mm_features": list(features), **request}
    return ChunkChain(SimpleNamespace(**fields), SIZE, adapters or Adapters())


def test_whole_chunks_alone_have_a_name() -> None:
    assert len(names()) == len(TOKENS) // SIZE
    assert len(chain().grow(TOKENS, 2)) == 2
    assert chain().grow(TOKENS[:3], 2) == []


@given(st.lists(st.integers(0, 5), max_size=24), st.lists(st.integers(0, 5), max_size=24))
def test_names_are_equal_as_far_as_the_prompts_are(one: list[int], other: list[int]) -> None:
    for index, (a, b) in enumerate(zip(names(one), names(other), strict=False)):
        end = (index + 1) * SIZE
        assert (a == b) == (one[:end] == other[:end])


def test_a_chain_grows_as_tokens_come() -> None:
    growing = chain()
    tokens: list[int] = []
    for token in TOKENS:
        tokens.append(token)
        growing.grow(tokens, 100)
    assert growing.names == names()


def test_tokens_of_any_vocabulary() -> None:
    assert len({*names([1 << 40] * SIZE), *names([1 << 8] * SIZE), *names([0] * SIZE)}) == 3


def test_media_are_named_where_they_reach_into_a_chunk_and_behind() -> None:
    plain = names()
    cat = chain(Feature("cat", Position(5, 5))).grow(TOKENS, 100)
    dog = chain(Feature("dog", Position(5, 5))).grow(TOKENS, 100)
    moved = chain(Feature("cat", Position(4, 5))).grow(TOKENS, 100)
    assert cat[0] == dog[0] == plain[0], "they begin in the second"
    for index in range(1, len(plain)):
        assert len({plain[index], cat[index], dog[index], moved[index]}) == 4


def test_a_salt_separates_prompts() -> None:
    assert not {*names(cache_salt="mine")} & {*names(cache_salt="yours")}
    assert not {*names(cache_salt="mine")} & {*names()}
    assert names(cache_salt="") == names(cache_salt=None) == names()


def test_adapters_count_by_their_content(tmp_path: Path) -> None:
    adapters = Adapters()

    def of(name: str, content: bytes, **options: Any) -> list[str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(content)
        lora = SimpleNamespace(
            lora_name=name, lora_int_id=len(name), lora_path=str(folder), **options
        )
        with pytest.raises(NotShareable, match="lora"):
            chain(adapters=adapters, lora_request=lora)
        wait_until(lambda: adapters.digest_of(lora), 10.0, "its files are read")
        return chain(adapters=adapters, lora_request=lora).grow(TOKENS, 100)

    one, same, other = of("a", b"weights"), of("bb", b"weights"), of("ccc", b"others")
    assert one == same
    assert not {*one} & {*other}
    assert not {*one} & {*names()}
    fused = of("dddd", b"weights", is_3d_lora_weight=True)
    assert not {*one} & {*fused}, "vLLM reads its files in another way"


def test_media_under_a_name_of_two_adapters_are_not_shared(tmp_path: Path) -> None:
    """vLLM's encoder cache has the output of the first one under it."""
    adapters, media = Adapters(encode=True), Feature("cats:abc", Position(0, 4))
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes([number]))
        lora = SimpleNamespace(lora_name="cats", lora_int_id=number, lora_path=str(folder))
        wait_until(lambda: adapters.digest_of(lora), 10.0, "its files are read")  # noqa: B023
        assert chain(adapters=adapters, lora_request=lora).grow(TOKENS, 100)
        if number == 1:
            assert chain(media, adapters=adapters, lora_request=lora).grow(TOKENS, 100)
    with pytest.raises(NotShareable, match="lora"):
        chain(media, adapters=adapters, lora_request=lora)


def test_adapters_that_the_engine_mixes_are_not_shared(tmp_path: Path) -> None:
    """Before vLLM 0.31, whose prefix cache knows their names only."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_name="cats", lora_int_id=1, lora_path=str(tmp_path))
    for mixed in (True, False):
        adapters = Adapters(mixed=mixed)
        wait_until(lambda: adapters.digest_of(lora), 10.0, "its files are read")  # noqa: B023
        assert chain(adapters=adapters).grow(TOKENS, 100)
        for fields in ({"lora_request": lora}, {"cache_salt": "cats"}):
            if not mixed:
                assert chain(adapters=adapters, **fields).grow(TOKENS, 100)
                continue
            with pytest.raises(NotShareable, match="lora"):
                chain(adapters=adapters, **fields)


@pytest.mark.vllm
@pytest.mark.parametrize(("lora", "caches", "mixes"), [(None, True, False), ((), False, False)])
def test_an_engine_mixes_adapters_only_with_both(lora: object, caches: bool, mixes: bool) -> None:
    config = SimpleNamespace(
        lora_config=lora, cache_config=SimpleNamespace(enable_prefix_caching=caches)
    )
    assert mixes_adapters(config) == mixes


@pytest.mark.vllm
def test_whether_this_vllm_knows_adapters_by_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        lora_config=object(), cache_config=SimpleNamespace(enable_prefix_caching=True)
    )
    assert not mixes_adapters(config), "vLLM 0.31 or newer"
    name = "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys"
    monkeypatch.setattr(name, lambda request: [request.lora_request.lora_name])  # of 0.30
    assert mixes_adapters(config)


def test_chunks_without_a_fleet_wide_name_are_not_shared() -> None:
    with pytest.raises(NotShareable, match="prompt_embeds"):
        chain(prompt_embeds=object())
    with pytest.raises(NotShareable, match="prompt_embeds"):
        chain(Feature("abc", Position(0, 4), modality="prompt_embeds"))
    with pytest.raises(NotShareable, match="session"):
        chain(resumable=True)
    with pytest.raises(NotShareable, match="identifier_counted"):
        chain(Feature("renderer0-mm-1-image-0", Position(0, 4)))
