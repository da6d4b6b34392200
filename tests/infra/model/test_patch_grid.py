"""Sizes and samples of images and videos are those of transformers' processors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from penstock.infra.model.patch_grid import BadGrid, MediaGrid, PatchGrid, patch_grid
from tests.properties import examples

TOWER = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
IMAGES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056}
OF_7B = patch_grid(TOWER, IMAGES, {})
SIDES = st.integers(1, 4000)


@examples(300)
@given(high=SIDES, wide=SIDES)
def test_an_image_has_the_size_that_transformers_gives_it(high: int, wide: int) -> None:
    try:
        rows, columns = (side // 28 for side in smart_resize(high, wide, 28, *OF_7B.pixels))
    except ValueError:
        with pytest.raises(BadGrid, match="at most 200 times"):
            OF_7B.image(high, wide)
    else:
        assert OF_7B.image(high, wide) == MediaGrid(1, rows, columns)
        assert OF_7B.image(high, wide).tokens >= OF_7B.least_tokens


def theirs(total: int, fps: float, high: int, wide: int) -> tuple[list[int], list[int], float]:
    """Frames, grid and seconds by the lines of Qwen2VLVideoProcessor, with ``cap_pixels_per_frame``."""
    most = min(768, total) // 2 * 2
    count = int(min(max(total / fps * 2.0, 4), most, total) // 2) * 2
    numbers = torch.arange(0, total, total / count).int().tolist()[:count]  # one more would be behind the last frame
    share = int(128_000 * 28 * 28 * 0.9) * 2 // len(numbers)
    pixels = max(min(768 * 28 * 28, share), int(128 * 28 * 28 * 1.05))
    high, wide = smart_resize(high, wide, 28, 128 * 28 * 28, pixels)
    return numbers, [-(-len(numbers) // 2), high // 28, wide // 28], 2 / (len(numbers) / total * fps)


@examples(300)
@given(total=st.integers(2, 9000), fps=st.floats(0.5, 240), high=st.integers(32, 2200), wide=st.integers(32, 2200))
def test_a_video_has_the_frames_that_transformers_samples(total: int, fps: float, high: int, wide: int) -> None:
    sample = OF_7B.video(total, fps, high, wide)
    frames, grid, seconds = theirs(total, fps, high, wide)
    assert (sample.frames, list(sample.grid), sample.seconds) == (frames, grid, seconds)
    assert sample.frames == sorted(set(sample.frames))
    assert (sample.height, sample.width) == (grid[1] * 28, grid[2] * 28)


def test_no_frame_behind_the_last_is_sampled() -> None:
    sample = OF_7B.video(136, 18.0, 480, 640)  # where torch.arange gives 15 numbers, the last of them 136
    assert (len(sample.frames), sample.frames[-1], sample.grid.steps) == (14, 126, 7)


def test_one_frame_is_a_step_in_time_by_itself() -> None:
    sample = OF_7B.video(1, 25.0, 480, 640)
    assert (sample.frames, sample.grid.steps) == ([0], 1)


def test_a_long_video_has_smaller_frames() -> None:
    short, long = (OF_7B.video(seconds * 30, 30.0, 1080, 1920) for seconds in (10, 300))
    assert short.grid == MediaGrid(10, 20, 36)
    assert (len(long.frames), long.grid) == (600, MediaGrid(300, 14, 26))
    assert long.grid.tokens < 128_000


@pytest.mark.parametrize(("total", "fps"), [(0, 25.0), (10, 0.0), (10, float("inf")), (10, float("nan"))])
def test_a_video_without_frames_or_rate_is_refused(total: int, fps: float) -> None:
    with pytest.raises(BadGrid, match=f"has {total} frames"):
        OF_7B.video(total, fps, 480, 640)


def test_settings_are_those_of_the_models_files() -> None:
    size = {"shortest_edge": 100, "longest_edge": 90_000}
    videos = {
        **IMAGES,
        "size": size,
        "min_pixels": None,
        "max_pixels": None,
        "fps": 1,
        "min_frames": 8,
        "max_frames": 64,
    }
    found = patch_grid(TOWER, IMAGES, videos)
    assert (found.pixels, found.frame_pixels) == ((3136, 12_845_056), (100, 90_000))
    assert (found.fps, found.frames, found.video_tokens) == (1.0, (8, 64), 128_000)
    fixed = patch_grid(TOWER, {}, {"num_frames": 32, "cap_pixels_per_frame": False})
    assert (fixed.frames, fixed.video_tokens, fixed.pixels) == ((32, 32), 0, (3136, 1_003_520))
    # What Qwen's own tools take where there is no file for videos: that of images has other limits.
    assert OF_7B.frame_pixels == (128 * 784, 768 * 784)


@pytest.mark.parametrize(
    ("tower", "images", "videos", "reason"),
    [
        ({"patch_size": 16}, IMAGES, {}, "the image processor has patch_size 14, the vision tower 16"),
        ({}, {**IMAGES, "merge_size": 4}, {}, "merge_size 4, the vision tower 2"),
        ({}, IMAGES, {"temporal_patch_size": 4}, "the video processor has temporal_patch_size 4"),
        ({"spatial_merge_size": 0}, IMAGES, {}, "config.json has spatial_merge_size 0"),
        ({}, {**IMAGES, "min_pixels": 5, "max_pixels": 4}, {}, "the image processor takes 5 to 4 pixels"),
        ({}, IMAGES, {"size": {"shortest_edge": "x"}}, "the video processor takes 'x'"),
        ({}, IMAGES, {"fps": -1}, "fps -1; expected a number above 0"),
        ({}, IMAGES, {"min_frames": 9, "max_frames": 8}, "samples 9 to 8 frames"),
    ],
)
def test_files_that_contradict_the_tower_are_refused_by_name(
    tower: dict[str, Any], images: dict[str, Any], videos: dict[str, Any], reason: str
) -> None:
    config = {"vision_config": TOWER["vision_config"] | tower}
    with pytest.raises(BadGrid, match=reason):
        patch_grid(config, images, videos)


def test_a_grid_is_counted_whole() -> None:
    assert MediaGrid(3, 4, 5).tokens == 60
    assert PatchGrid(4, 2, 2, (64, 640), (64, 640)).square == 8
