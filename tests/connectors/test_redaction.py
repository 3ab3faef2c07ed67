"""What the connector publishes of its settings: nothing that others should not read."""

import json

import pytest

from connectors.namespace import namespace_parts, redacted
from lookup_buffer.namespace import Namespace
from test_engine_namespace import SETTINGS, change, vllm_config

SECRET = "geheim-7f3a"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", f"/home/{SECRET}/models/siglip"),
        ("model_config.model", f"~/{SECRET}/siglip"),
        ("model_config.model", f"file:///{SECRET}/siglip"),
        ("model_config.model", f"s3://user:{SECRET}@bucket/siglip"),
        ("model_config.hf_overrides", {"auth_token": SECRET, "name": "siglip"}),
        ("model_config.quantization_config", {"folder": f"/{SECRET}/siglip"}),
        (
            "model_config.multimodal_config.media_io_kwargs",
            {"image": {"headers": [{"api_key": SECRET}], "siglip": 1}},
        ),
        ("load_config", None),
    ],
)
def test_neither_secrets_nor_folders_are_published(path: str, value: object) -> None:
    seen = []
    for secret in (SECRET, SECRET, f"{SECRET}2"):
        config = vllm_config()
        if value is None:
            config.load_config.load_format = "siglip"
            config.load_config.model_loader_extra_config = {"aws_secret_access_key": secret}
        else:
            as_json = json.dumps(value).replace(SECRET, secret)
            change(path, json.loads(as_json))(config)
        namespace = Namespace(namespace_parts(config, SETTINGS))
        published = json.dumps(dict(namespace.parts))
        assert SECRET not in published
        assert "siglip" in published
        seen.append(namespace.fingerprint)
    assert seen[0] == seen[1] != seen[2], "what differs goes on to differ"


@pytest.mark.parametrize(
    "value",
    ["org/model", "models/siglip", "s3://bucket/model", {"size": {"edge": [1, 2.5, None, True]}}],
)
def test_values_that_are_no_secret_are_unchanged(value: object) -> None:
    assert redacted(value) == value


def test_a_value_that_is_named_like_a_secret_still_counts() -> None:
    values = [{"image_token": token} for token in ("<image>", "<img>", "", None)]
    shown = [json.dumps(redacted(value)) for value in values]
    assert shown[0] != shown[1]
    assert len({shown[2], shown[3]}) == 1, "nothing to withhold"
