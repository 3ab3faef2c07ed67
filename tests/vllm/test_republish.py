"""What an encode-only server (`ec_producer`) holds and the buffer has lost comes back.

As behind a proxy of vLLM's kind: each request goes to the producer first, and then, as metadata
alone, to a consumer on another host. The buffer loses the item in four ways; in each of them the
same request is answered again, with the same tokens. What the producer itself had skipped:
test_ec_republishing_nodes.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from command_line import run
from engines import START_SECONDS, TwoHosts, connector
from models import ensure_audio_model
from nodes import ROOT, wait_until
from openai_servers import OpenAIServer, Part, Reply, text
from patience import slowness
from test_engine_handoff import audio_settings, clips, named

pytestmark = pytest.mark.vllm
QUESTION = text("What do you hear?")
TTL_SECONDS = 15.0 * slowness()
GONE_SECONDS = 120.0


class Fleet:
    def __init__(self, producer: OpenAIServer, consumer: OpenAIServer, hosts: TwoHosts) -> None:
        self.producer, self.consumer, self.hosts = producer, consumer, hosts

    def encode(self, *parts: Part) -> dict[str, Any]:
        """What the producer reports of the items."""
        reply = self.producer.ask(*parts, QUESTION, tokens=1)
        assert reply.status == 200, reply
        reported: dict[str, Any] = reply.body["ec_transfer_params"]
        return reported

    def serve(self, *parts: Part) -> Reply:
        """As the proxy does it: the consumer is asked as soon as the producer has answered."""
        reported = self.encode(*parts)
        without_media = [named(key, item["metadata"]) for key, item in reported.items()]
        return self.consumer.ask(*without_media, QUESTION, ec_transfer_params=reported)

    def wait_until_gone(self, identifier: str) -> None:
        wait_until(lambda: not self.hosts.holders(identifier), GONE_SECONDS, "the item is lost")

    def start_nodes(self) -> None:
        for node in self.hosts.nodes:
            node.start()
        self.hosts.wait_until_attached()


@pytest.fixture(scope="module")
def servers(places: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    work = tmp_path_factory.mktemp("republish")
    model = ensure_audio_model(ROOT / "build" / "models").resolve()
    to_produce = connector(places.a, ttl_seconds=TTL_SECONDS) | {"ec_role": "ec_producer"}
    to_consume = connector(places.b) | {"ec_role": "ec_consumer"}
    with (
        OpenAIServer(
            audio_settings("producer", model, work, 0, ec_transfer_config=to_produce)
        ) as producer,
        OpenAIServer(
            audio_settings("consumer", model, work, 1, ec_transfer_config=to_consume)
        ) as consumer,
    ):
        for server in (producer, consumer):
            server.wait_ready(START_SECONDS)
        yield Fleet(producer, consumer, places)
        for server in (producer, consumer):
            assert server.is_healthy(), server.log_tail()
            assert "EngineDead" not in server.log_text(), server.log_tail()


@pytest.fixture
def fleet(servers: Fleet) -> Iterator[Fleet]:
    servers.hosts.start()
    servers.hosts.wait_until_attached()
    try:
        yield servers
    finally:
        servers.hosts.stop()


def replace_nodes(fleet: Fleet, identifier: str) -> None:
    """Each ends in order, and another takes its place. The record of the item stays in Redis, with
    holders that have left."""
    for node in fleet.hosts.nodes:
        node.terminate()
    assert not fleet.hosts.store.beats()
    fleet.start_nodes()


def kill_nodes(fleet: Fleet, identifier: str) -> None:
    """Redis still names them as holders."""
    for node in fleet.hosts.nodes:
        node.kill()
    assert fleet.hosts.holders(identifier)
    fleet.start_nodes()


def outlive(fleet: Fleet, identifier: str) -> None:
    fleet.wait_until_gone(identifier)


def invalidate(fleet: Fleet, identifier: str) -> None:
    (record,) = [one for one in fleet.hosts.store.scan() if one.key == identifier]
    done = run("invalidate", record.namespace, "--store-url", fleet.hosts.server.url)
    assert done.returncode == 0, done.stderr
    fleet.wait_until_gone(identifier)


LOSSES = {
    "the nodes are replaced": replace_nodes,
    "the nodes are killed": kill_nodes,
    "its time to live is over": outlive,
    "its namespace is invalidated": invalidate,
}


@pytest.mark.parametrize(("number", "loss"), list(enumerate(LOSSES)))
def test_what_the_producer_still_holds_is_published_again(
    fleet: Fleet, number: int, loss: str
) -> None:
    first = fleet.serve(*clips(number))
    assert first.status == 200, first
    (identifier,) = fleet.encode(*clips(number))
    encodes = fleet.producer.schedule.encoder_runs()
    fleet.hosts.wait_for_holder(identifier, fleet.hosts.a)
    LOSSES[loss](fleet, identifier)
    again = fleet.serve(*clips(number))
    assert again.status == 200, (loss, again, fleet.producer.log_tail())
    assert again.tokens == first.tokens
    assert fleet.producer.schedule.encoder_runs() == encodes, "it was there to be published"
