"""What a request carries for an item, read from its processed fields."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import Feature, Position
from connectors.identifiers import ItemPayload, payload_of


def element(nbytes: int = 8, *, keep_on_cpu: bool = False) -> Any:
    """One processed field, with the attributes of vLLM's `MultiModalFieldElem` that we read."""
    return SimpleNamespace(
        data=SimpleNamespace(nbytes=nbytes), field=SimpleNamespace(keep_on_cpu=keep_on_cpu)
    )


@pytest.mark.parametrize(
    ("data", "carried"),
    [
        (None, ItemPayload.METADATA),
        ({}, ItemPayload.METADATA),
        ({"pixel_values": element(1 << 20), "num_patches": element()}, ItemPayload.MEDIA),
        ({"pixel_values": element(64)}, ItemPayload.MEDIA),
        ({"image_grid_thw": element(24)}, ItemPayload.METADATA),
        # As vLLM's renderer hands it on for a model that declares no fields for it.
        ({"num_patches": element(keep_on_cpu=True)}, ItemPayload.METADATA),
        ({"timestamps": element(1 << 20, keep_on_cpu=True)}, ItemPayload.METADATA),
        (
            {"timestamps": element(1 << 20, keep_on_cpu=True), "image_grid_thw": element(24)},
            ItemPayload.METADATA,
        ),
        (
            {"timestamps": element(1 << 20, keep_on_cpu=True), "pixel_values": element(1 << 20)},
            ItemPayload.MEDIA,
        ),
        (
            {"num_patches": element(keep_on_cpu=True), "image_grid_thw": element(24)},
            ItemPayload.METADATA,
        ),
        ({"num_patches": element(keep_on_cpu=True), "pixels": element(64)}, ItemPayload.MEDIA),
        ({"image_embeds": element(1 << 20), "image_grid_thw": element()}, ItemPayload.EMBEDDINGS),
    ],
)
def test_carried(data: dict[str, Any] | None, carried: ItemPayload) -> None:
    feature = Feature("A", Position(0, 4), data=data)
    assert payload_of(feature, lambda _: {"image_grid_thw"}) is carried
