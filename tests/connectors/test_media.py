"""What a request carries for an item, read from its processed fields."""

from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import Feature, Position
from connectors.identifiers import Carried, carried_by


def element(nbytes: int = 8, *, keep_on_cpu: bool = False) -> Any:
    """One processed field, with the attributes of vLLM's `MultiModalFieldElem` that we read."""
    return SimpleNamespace(
        data=SimpleNamespace(nbytes=nbytes), field=SimpleNamespace(keep_on_cpu=keep_on_cpu)
    )


@pytest.mark.parametrize(
    ("data", "carried"),
    [
        (None, Carried.METADATA),
        ({}, Carried.METADATA),
        ({"pixel_values": element(1 << 20), "num_patches": element()}, Carried.MEDIA),
        ({"pixel_values": element(64)}, Carried.MEDIA),
        ({"image_grid_thw": element(24)}, Carried.METADATA),
        # As vLLM's renderer hands it on for a model that declares no fields for it.
        ({"num_patches": element(keep_on_cpu=True)}, Carried.METADATA),
        (
            {"num_patches": element(keep_on_cpu=True), "image_grid_thw": element(24)},
            Carried.METADATA,
        ),
        ({"num_patches": element(keep_on_cpu=True), "pixels": element(64)}, Carried.MEDIA),
        ({"image_embeds": element(1 << 20), "image_grid_thw": element()}, Carried.EMBEDDINGS),
    ],
)
def test_carried(data: dict[str, Any] | None, carried: Carried) -> None:
    feature = Feature("A", Position(0, 4), data=data)
    assert carried_by(feature, lambda _: {"image_grid_thw"}) is carried
