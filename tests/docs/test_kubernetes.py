"""deploy/kubernetes: its parts fit each other, and its node's command runs.

No Kubernetes ran them. By hand they were held against the schemas of Kubernetes 1.37.
"""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.settings import parse_settings
from deployment import Service, Stack, running_stack
from lookup_buffer.config import BufferConfig
from lookup_buffer.environment import ENVIRONMENT_PREFIX
from nodes import ROOT, wait_until
from store.url import parse

FOLDER = ROOT / "deploy/kubernetes"
POD = "lookup-buffer-x7k2p"
SECRETS = "/run/secrets/lookup-buffer/"


def _objects() -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if each["kind"] != "Kustomization":
                found[each["kind"], each["metadata"]["name"]] = each
    return found


OBJECTS = _objects()
PODS = {
    name: each["spec"]["template"]["spec"]
    for (_, name), each in OBJECTS.items()
    if "template" in each.get("spec", {})
}
(NODE,) = PODS["lookup-buffer"]["containers"]
(ENGINE,) = PODS["vllm"]["containers"]


def _environment() -> dict[str, str]:
    """Of the node, as the kubelet makes it: fields of the pod, `$(NAME)` of what stands before."""
    given: dict[str, str] = {}
    fields = {"status.podIP": "10.0.0.7", "metadata.name": POD}
    for variable in NODE["env"]:
        if "valueFrom" in variable:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], variable["value"])
        given[variable["name"]] = value
    return given


def _engine_settings() -> dict[str, Any]:
    arguments = ENGINE["args"]
    connector = json.loads(arguments[arguments.index("--ec-transfer-config") + 1])
    settings: dict[str, Any] = connector["ec_connector_extra_config"]
    return settings


def test_the_kustomization_names_existing_files() -> None:
    named = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    here = {path.name for path in FOLDER.glob("*.yaml")}
    assert here - set(named) == {"kustomization.yaml", "monitoring.yaml"}
    assert set(named) <= here


@pytest.mark.parametrize("name", sorted(PODS))
def test_a_pods_mounts_exist_and_its_rights_are_minimal(name: str) -> None:
    pod = PODS[name]
    secret = OBJECTS["Secret", "lookup-buffer"]["stringData"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for volume in volumes.values():
        if "secret" in volume:
            assert ("Secret", volume["secret"]["secretName"]) in OBJECTS
            assert {each["key"] for each in volume["secret"].get("items", [])} <= set(secret)
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in OBJECTS
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert (pod["securityContext"] | security)["runAsNonRoot"] is True
        assert (pod["securityContext"] | security)["runAsUser"] > 0
        resources = container["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_services_and_policies_select_their_pods() -> None:
    for (kind, name), each in OBJECTS.items():
        if kind == "Service":
            (port,) = each["spec"]["ports"]
            (container,) = PODS[each["spec"]["selector"]["app.kubernetes.io/name"]]["containers"]
            assert port["targetPort"] in {port["name"] for port in container["ports"]}, name
        if kind == "NetworkPolicy":
            pods = PODS[each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]]
            ports = {port["name"] for port in pods["containers"][0]["ports"]}
            assert {rule["ports"][0]["port"] for rule in each["spec"]["ingress"]} <= ports


def test_engine_and_node_agree() -> None:
    """What a node compares when an engine connects, and where the engine searches the node."""
    node, engine = _environment(), _engine_settings()
    place = parse(engine["store_url"]).place
    assert place == parse(node["LOOKUP_BUFFER_STORE_URL"]).place
    assert engine["capacity_bytes"] == node["LOOKUP_BUFFER_CAPACITY_BYTES"]
    assert engine["node_socket"] == node["LOOKUP_BUFFER_DIRECTORY"] + "/node.sock"
    paths = [
        volume["hostPath"]["path"]
        for name in ("vllm", "lookup-buffer")
        for volume in PODS[name]["volumes"]
        if volume["name"] == "socket"
    ]
    assert len(set(paths)) == 1
    (mount,) = [m for m in PODS["vllm"]["containers"][0]["volumeMounts"] if m["name"] == "socket"]
    assert mount["readOnly"] is True, "or it could take the node's place"
    assert PODS["vllm"]["securityContext"]["runAsUser"] == NODE["securityContext"]["runAsUser"]
    engine["capacity_bytes"] = "1GiB"  # nor that much memory, perhaps
    parse_settings(engine)


def test_each_pod_has_the_secrets_that_it_needs() -> None:
    has = {
        name: {
            item["key"]
            for volume in pod["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        }
        for name, pod in PODS.items()
    }
    assert has == {
        "lookup-buffer": {"token", "http_token", "store_password"},
        "valkey": {"store_password", "store_admin_password"},
        "vllm": set(),
    }


def test_nodes_and_valkey_call_no_others() -> None:
    """By policies, and as far as the cluster enforces them."""
    node, valkey = (OBJECTS["NetworkPolicy", name]["spec"] for name in ("nodes", "valkey"))
    for spec in (node, valkey):
        assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert valkey["egress"] == []
    ports = [[port["port"] for port in rule["ports"]] for rule in node["egress"]]
    assert ports == [["tensors"], ["redis"], [53, 53]]
    assert all(rule["to"] for rule in node["egress"]), "an empty list is everybody"


def test_no_probe_restarts_a_node() -> None:
    """While Redis is away it is not of full use, however long ago it was started."""
    assert [name for name in NODE if name.endswith("Probe")] == ["readinessProbe"]


def test_valkey_is_that_of_the_compose_file() -> None:
    (container,) = PODS["valkey"]["containers"]
    theirs = container["args"][0].replace(SECRETS, "/run/secrets/")
    assert theirs == Service("valkey").command[-1]
    ours = (ROOT / "deploy/valkey/valkey.conf").read_text()
    kept = "".join(line for line in ours.splitlines(keepends=True) if not line.startswith("#"))
    assert OBJECTS["ConfigMap", "valkey"]["data"]["valkey.conf"] == kept


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (("a", "b"), True),
        (("replace-me-3", "b"), False),
        (("a", "replace-me-4"), False),
        (("a", ""), False),
    ],
)
def test_valkey_starts_with_no_placeholder_as_a_password(
    tmp_path: Path, words: tuple[str, str], *, starts: bool
) -> None:
    for name, word in zip(("store_password", "store_admin_password"), words, strict=True):
        (tmp_path / name).write_text(word)
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\ncat\n")
    server.chmod(0o755)
    (container,) = PODS["valkey"]["containers"]
    command = [*container["command"], container["args"][0].replace(SECRETS, f"{tmp_path}/")]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ("user lookup-buffer on >a " in done.stdout) == starts == (done.returncode == 0)
    assert ("is empty or a placeholder" in done.stderr) != starts


@pytest.fixture
def stack() -> Iterator[Stack]:
    yield from running_stack("valkey")


@pytest.mark.processes
def test_the_command_of_the_node_runs_with_its_environment(stack: Stack) -> None:
    service = Service("node-a")  # whose address and folders it gets
    stack.prepare(service)
    given = _environment()
    known = {ENVIRONMENT_PREFIX + name.upper() for name in BufferConfig.model_fields}
    assert {name.removesuffix("_FILE") for name in given} - known == {"POD_IP"}
    given["LOOKUP_BUFFER_CAPACITY_BYTES"] = "64MiB"
    words = {"valkey.lookup-buffer.svc": "valkey", "10.0.0.7": "node-a", SECRETS: "/run/secrets/"}
    for name, value in given.items():
        for theirs, ours in words.items():
            value = value.replace(theirs, ours)
        given[name] = stack.translated(service, value)
    path = stack.environment(service)["PATH"]
    with stack.log("pod").open("wb") as log:
        process = subprocess.Popen(
            ["lookup-buffer", *NODE["args"]], env=given | {"PATH": path}, stdout=log, stderr=log,
            executable=stack.base / "bin/lookup-buffer",
        )  # fmt: skip
    stack.processes["pod"] = process
    port = {each["name"]: each["containerPort"] for each in NODE["ports"]}["http"]
    probe = NODE["readinessProbe"]["httpGet"]
    url = f"http://{stack.addresses['node-a']}:{port}{probe['path']}"

    def ready() -> bool:
        assert process.poll() is None, stack.log("pod").read_text()
        try:
            with urllib.request.urlopen(url, timeout=3) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(ready, 30.0, "it is ready")
    assert f"node {POD} is ready" in stack.log("pod").read_text()
    assert os.path.exists(stack.translated(service, _engine_settings()["node_socket"]))
    assert stack.stop("pod") == 0
