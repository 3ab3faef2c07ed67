"""The vLLM commands of docker-compose.yml and deploy/kubernetes.

Each is read by vLLM's own parser and by the connector. One is run: the real server, on the small
model of the tests, beside the node of the compose file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from connectors.settings import parse_settings
from deployment import NODE_UID, Service, Stack, client_config, running_stack
from engines import START_SECONDS, Album, engine_settings
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.namespace import Namespace
from nodes import ROOT, wait_until
from openai_servers import OpenAIServer, parts_of
from store.url import parse

ROLES = {
    "replica-a": "ec_both",
    "replica-b": "ec_both",
    "encoder": "ec_producer",
    "consumer": "ec_consumer",
}


def _arguments(name: str) -> list[str]:
    """Of `vllm serve`."""
    if name in ROLES:
        program, command, *arguments = Service(name).command
        assert (program, command) == ("vllm", "serve")
        return arguments
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/vllm.yaml").read_text())
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    found: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


@pytest.mark.parametrize("name", [*ROLES, "kubernetes"])
def test_vllm_and_the_connector_take_it(name: str) -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(_arguments(name))
    validate_parsed_serve_args(parsed)
    assert parsed.model_tag == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert (parsed.host, parsed.port) == ("0.0.0.0", 8000)
    transfer: Any = parsed.ec_transfer_config
    connector = transfer if isinstance(transfer, dict) else vars(transfer)
    assert connector["ec_connector"] == "LookupBufferECConnector"
    assert connector["ec_role"] == ROLES.get(name, "ec_both")
    settings = connector["ec_connector_extra_config"]
    if name == "kubernetes":
        settings["capacity_bytes"] = "1GiB"  # this machine may have less than its hosts
    assert parse_settings(settings).node_socket == Path("/run/lookup-buffer/node/node.sock")


@pytest.mark.parametrize("name", ROLES)
def test_an_engine_agrees_with_its_node(name: str) -> None:
    """About what a node compares; and they share the volume with the socket, and the user."""
    engine = Service(name)
    (node,) = [Service(each) for each in engine.raw["depends_on"]]
    arguments = _arguments(name)
    connector = json.loads(arguments[arguments.index("--ec-transfer-config") + 1])
    settings = connector["ec_connector_extra_config"]
    told = node.environment
    assert parse(settings["store_url"]).place == parse(told["LOOKUP_BUFFER_STORE_URL"]).place
    assert settings["capacity_bytes"] == told["LOOKUP_BUFFER_CAPACITY_BYTES"]
    assert settings["node_socket"] == told["LOOKUP_BUFFER_DIRECTORY"] + "/node.sock"
    assert set(node.mounts) <= set(engine.mounts)
    assert engine.user == node.user


@pytest.fixture
def stack() -> Iterator[Stack]:
    yield from running_stack("valkey", "node-a")


@pytest.mark.vllm
def test_a_replica_stores_what_it_encodes(
    stack: Stack, album: Album, model: Path, tmp_path: Path
) -> None:
    """Its flags as they stand, but for model, host and port, and its user, who is not the node's
    here; then those that make it small."""
    service = Service("replica-a")
    _, *flags = [
        stack.translated(service, word).replace(
            '"node_socket":', f'"node_uid": {NODE_UID}, "node_socket":'
        )
        for word in _arguments(service.name)
        if not word.startswith(("--host=", "--port="))
    ]
    config = client_config(stack, Service("node-a"))
    question = album.about(0)
    with (
        OpenAIServer(engine_settings(service.name, model, tmp_path), *flags) as server,
        LookupBuffer(config, Namespace.named("tests")) as client,
    ):
        server.wait_ready(START_SECONDS)
        reply = server.ask(*parts_of(question))
        assert server.origins(reply) == ("encoded",)
        wait_until(lambda: client.stats()["items"] == 1, 20.0, "its output is stored")
        # Another picture drives the first one out of vLLM's own cache, which holds one.
        server.ask(*parts_of(album.about(1)))
        again = server.ask(*parts_of(question))
        assert server.origins(again) == ("loaded",)
        assert again.tokens == reply.tokens
