"""Two real vLLM engines that share the KV of prompt prefixes: right tokens, and fewer computed."""

import pytest

from connectors.demo.engine import Question
from engines import Album
from kv_engines import BLOCK, CHUNK, KvPair, ask_for, prompt

pytestmark = pytest.mark.vllm


def test_a_prompt_that_the_other_instance_has_seen_is_loaded(kv_pair: KvPair) -> None:
    pair, tokens = kv_pair, prompt(700, seed=1)
    first = pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens))
    assert first.computed == 700
    again = pair.ask(pair.b, ask_for(tokens))
    assert again.computed == 700 - 699 // CHUNK * CHUNK
    assert pair.tokens(ask_for(tokens)) != pair.tokens(ask_for(prompt(700, seed=2))), "a control"


def test_a_prompt_that_ends_with_a_chunk_computes_one(kv_pair: KvPair) -> None:
    """Somebody has to say what comes next."""
    pair, tokens = kv_pair, prompt(4 * CHUNK, seed=3)
    pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens))
    assert pair.ask(pair.b, ask_for(tokens)).computed == CHUNK


def test_half_of_a_prompt(kv_pair: KvPair) -> None:
    pair, tokens = kv_pair, prompt(600, seed=4)
    pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens))
    other = tokens[:300] + prompt(300, seed=5)
    assert pair.ask(pair.b, ask_for(other)).computed == 600 - 300 // CHUNK * CHUNK


def test_what_vllm_has_itself_is_not_loaded(kv_pair: KvPair) -> None:
    """Its prefix ends within a chunk: of that one only the blocks behind are loaded."""
    pair, tokens = kv_pair, prompt(500, seed=6)
    pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens))
    assert CHUNK < 3 * BLOCK < 2 * CHUNK
    own = tokens[: 3 * BLOCK] + prompt(20, seed=7)
    assert pair.ask(pair.b, ask_for(own)).computed < len(own), "chunk 0 is loaded, too"
    assert pair.ask(pair.b, ask_for(tokens)).computed == 500 - 499 // CHUNK * CHUNK


def test_turns_of_a_conversation_on_either_instance(kv_pair: KvPair) -> None:
    """The answer's own KV is stored where it fills a chunk, so the next turn has it."""
    pair, tokens = kv_pair, prompt(330, seed=8)
    first = pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens, answer=70))
    second = tokens + first.answer.tokens + prompt(30, seed=9)
    asked = pair.ask_and_store(pair.b, pair.hosts.b, ask_for(second, answer=8))
    assert asked.computed == len(second) - 399 // CHUNK * CHUNK
    third = second + asked.answer.tokens + prompt(40, seed=10)
    asked = pair.ask(pair.a, ask_for(third))
    assert asked.computed == len(third) - (len(second) + 7) // CHUNK * CHUNK


def test_a_salt_keeps_apart(kv_pair: KvPair) -> None:
    """Checked where it enters, in test_connectors_kv_chunks; here that prompts do not mix."""
    pair = kv_pair
    questions = [ask_for(prompt(200, seed=20) + prompt(150, seed=21 + i)) for i in range(4)]
    for question in questions:
        pair.ask(pair.a, question)
    pair.b.submit(questions)
    answers = pair.b.collect(timeout_seconds=20.0)
    assert [answer.tokens for answer in answers] == [pair.tokens(each) for each in questions]


def test_a_prompt_with_a_picture_and_both_connectors(kv_pair: KvPair, album: Album) -> None:
    pair = kv_pair
    picture = album.about(0)
    question = Question(picture.images, "<image>" + "what is in the picture? " * 6, 8)
    first = pair.ask(pair.a, question)
    assert first.answer.origins == ("encoded",)
    pair.hosts.wait_for_holder(first.answer.identifiers[0], pair.hosts.a)
    again = pair.ask(pair.b, question)
    assert again.computed < first.computed // 2
    assert "encoded" not in again.answer.origins

    other = Question(album.about(1).images, question.prompt, 8)
    assert pair.tokens(other) != pair.tokens(question), "pictures are told apart"
    asked = pair.ask(pair.b, other)  # the same tokens, up to the picture's name
    assert asked.answer.origins == ("encoded",)
