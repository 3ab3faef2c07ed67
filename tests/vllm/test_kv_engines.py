"""Two real vLLM engines that share the KV of prompt prefixes: right tokens, and fewer computed."""

import itertools
import os
import signal
import time

import pytest

from engines import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK,
    HANDOFF_SECONDS,
    Album,
    KvPair,
    ask_for,
    interrupted,
    prompt,
)
from examples.demo.engine import Question
from nodes import wait_until
from servers import frozen

pytestmark = pytest.mark.vllm
RECOVERY_SECONDS = 30.0
TOKEN_BYTES = BLOCK_BYTES // BLOCK
STORE_SECONDS = 1.0
STANDSTILL_SECONDS = 2.0
"""No transfer that stands still is given up sooner."""


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


def test_prompts_that_begin_alike_at_once(kv_pair: KvPair) -> None:
    pair = kv_pair
    questions = [ask_for(prompt(200, seed=20) + prompt(150, seed=21 + i)) for i in range(4)]
    for question in questions:
        pair.ask(pair.a, question)
    pair.b.submit(questions)
    answers = pair.b.collect()
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


def test_prefill_here_and_decode_there(kv_pair: KvPair) -> None:
    """By an id, and once: a second request with it computes at once, and one whose prompt was never
    handed over after a bounded wait. Of what was handed over one token is computed."""
    pair, tokens = kv_pair, prompt(430, seed=70)
    prefill = ask_for(tokens, answer=1, do_remote_decode=True)
    told = pair.ask(pair.a, prefill).answer.kv_transfer_params
    assert told is not None
    decode = ask_for(tokens, answer=24, **told)
    assert pair.ask(pair.b, decode).computed == 1
    again = Question((), "", 8, (*tokens[:400], *prompt(30, seed=71)), told)
    assert pair.ask(pair.b, again).computed < 430, "vLLM itself has its beginning"
    never = ask_for(prompt(300, seed=72), **{**told, "transfer_id": "never-sent"})
    started = time.monotonic()
    assert pair.ask(pair.b, never).computed == 300
    assert time.monotonic() - started >= HANDOFF_SECONDS


def test_preempted_requests_answer_rightly(kv_pair: KvPair) -> None:
    """Four of them do not fit together, so blocks of one get another's content while what was in
    them is being stored; what is stored is loaded by the other engine, which tells."""
    pair = kv_pair
    questions = [ask_for(prompt(540, seed=30 + number), answer=64) for number in range(4)]
    expected = [pair.tokens(question) for question in questions]
    before = len(pair.a.schedule.steps())
    for _ in range(2):  # the second time all of them begin with a load
        pair.a.submit(questions)
        answers = pair.a.collect()
        assert [answer.tokens for answer in answers] == expected
    assert interrupted(pair.a.schedule.steps()[before:])
    pair.b.submit(questions)
    answers = pair.b.collect()
    assert [answer.tokens for answer in answers] == expected


def test_loads_that_fail_are_computed(kv_pair: KvPair) -> None:
    """Promised, and gone when the worker copies; at once, and after two chunks of eight."""
    pair = kv_pair
    for seed, passed in ((40, 0), (41, 2)):
        tokens = prompt(550, seed=seed)
        pair.ask_and_store(pair.a, pair.hosts.a, ask_for(tokens))
        pair.fault.write_text(str(passed))
        try:
            assert pair.ask(pair.b, ask_for(tokens)).computed == 550 - passed * CHUNK
        finally:
            pair.fault.unlink()
    assert pair.ask(pair.b, ask_for(tokens)).computed < BLOCK, "vLLM kept what it computed"


def test_nodes_and_redis_come_and_go(kv_pair: KvPair) -> None:
    """Each answer is right and in time; afterwards both share again. The nodes end with it."""
    pair, seeds = kv_pair, itertools.count(50)
    hosts = pair.hosts

    def known_to_a() -> Question:
        question = ask_for(prompt(400, seed=next(seeds)))
        pair.ask_and_store(pair.a, hosts.a, question)
        return question

    known = known_to_a()
    with frozen(hosts.server):  # what lies on the other host cannot be found
        assert pair.ask(pair.b, known).computed == 400
        assert pair.ask(pair.a, known).computed < CHUNK
    known = known_to_a()
    hosts.relay.hold_after(
        3 * CHUNK * TOKEN_BYTES
    )  # six chunks come from the other host, or begin to
    started = time.monotonic()
    assert pair.ask(pair.b, known).computed > 400 - 5 * CHUNK, "what came is used, if anything"
    assert time.monotonic() - started >= STANDSTILL_SECONDS
    hosts.relay.let_go()
    known = known_to_a()
    for node in hosts.nodes:  # the reader's own, and the holder's
        with node.frozen():
            assert pair.ask(pair.b, known).computed <= 400
    known = known_to_a()
    hosts.a.kill()
    assert pair.ask(pair.b, known).computed == 400
    assert pair.ask(pair.a, known).computed == 400
    hosts.a.start()
    hosts.wait_until_attached()
    known = known_to_a()
    hosts.b.kill()
    assert pair.ask(pair.b, known).computed == 400
    hosts.b.start()
    hosts.wait_until_attached()
    os.kill(hosts.server.pid, signal.SIGKILL)
    assert pair.ask(pair.b, ask_for(prompt(400, seed=next(seeds)))).computed == 400
    hosts.restart_server()
    wait_until(lambda: len(hosts.store.beats()) == 2, RECOVERY_SECONDS, "both nodes beat")

    def shares() -> bool:
        return pair.ask(pair.b, known_to_a()).computed < CHUNK

    wait_until(shares, RECOVERY_SECONDS, "engine b loads again")
    hosts.stop()
