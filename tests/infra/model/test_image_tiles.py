"""Embeddings of an image in tiles, against transformers' own count."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from penstock.infra.model.patch_grid import BadTiles, Tiles, tiles_of

# As llava-v1.6-mistral-7b and -34b have them.
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CONFIG = {"vision_config": {"image_size": 336, "patch_size": 14}, "image_grid_pinpoints": PINPOINTS}
SIDES = st.integers(1, 4000)


def theirs(height: int, width: int) -> int:
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=PINPOINTS), patch_size=14, num_additional_image_tokens=0
    )
    processor._get_unpadded_features = lambda *sizes: LlavaNextProcessor._get_unpadded_features(processor, *sizes)
    return int(LlavaNextProcessor._get_number_of_features(processor, height, width, 336, 336))


@given(height=SIDES, width=SIDES)
def test_an_image_of_any_shape_takes_as_many_as_transformers_says(height: int, width: int) -> None:
    tiles = tiles_of(CONFIG, 576)
    assert tiles.tokens(height, width) == theirs(height, width)
    assert tiles.base <= tiles.tokens(height, width) <= tiles.most


def test_published_sizes() -> None:
    tiles = tiles_of(CONFIG, 576)
    assert tiles == Tiles(336, 24, tuple((height, width) for height, width in PINPOINTS), 576)
    assert tiles.tokens(672, 672) == 576 + 48 * 48 + 48 == tiles.most
    assert tiles.canvas(100, 100) == (336, 672)  # of those that lose nothing, the one that pads least
    assert tiles.canvas(2000, 2000) == (672, 672)


@pytest.mark.parametrize(
    "change",
    [
        {"image_grid_pinpoints": None},
        {"image_grid_pinpoints": []},
        {"image_grid_pinpoints": [[336, 500]]},
        {"image_grid_pinpoints": [[336]]},
        {"image_grid_pinpoints": [[672, 672], "672"]},
        {"vision_config": {}},
    ],
)
def test_a_configuration_without_usable_canvases_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadTiles, match=r"config\.json has"):
        tiles_of(CONFIG | change, 576)
