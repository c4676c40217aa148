"""The NaViT rule and the patches of the tiny checkpoint's image processor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kimi_draft.tiny.config import MEDIA
from kimi_draft.tiny.processing_tiny_kimi import TinyKimiImageProcessor, navit_size

REAL = MEDIA | {"in_patch_limit": 16384, "patch_limit_on_one_side": 512}


def tokens(width, height, config):
    return TinyKimiImageProcessor(media_proc_cfg=config).media_tokens_calculator(
        {"image": Image.new("L", (width, height))}
    )


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((224, 224), 64),
        ((448, 448), 256),
        ((640, 360), 299),
        ((1024, 768), 1036),
        ((1920, 1080), 2691),
        ((3840, 2160), 4214),
    ],
)
def test_token_counts_under_the_real_limits(size, count):
    assert tokens(*size, REAL) == count


def test_token_counts_under_the_tiny_limits():
    assert tokens(84, 84, MEDIA) == 9
    assert tokens(112, 56, MEDIA) == 8
    assert tokens(2000, 1500, MEDIA) == 266
    assert tokens(1, 1, MEDIA) == 1


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_size_rule(width, height):
    new_width, new_height, right, bottom = navit_size(width, height, MEDIA)
    assert 1 <= new_width <= width and 1 <= new_height <= height
    assert (new_width + right) % 28 == 0 == (new_height + bottom) % 28 and right < 28 > bottom
    # The rule counts whole patches, so what remains may exceed the limit by the cut-off rests; padding adds a little.
    assert (new_width + right) // 28 * ((new_height + bottom) // 28) <= 340


def test_patches_are_row_major_and_normalised():
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    out = TinyKimiImageProcessor(media_proc_cfg=MEDIA).preprocess([{"image": Image.fromarray(pixels)}])
    patches = out["pixel_values"].numpy()
    assert out["grid_thws"].tolist() == [[1, 4, 6]]
    assert patches.shape == (24, 3, 14, 14) and patches.dtype == np.float32
    patch = patches[1 * 6 + 2].transpose(1, 2, 0)  # row 1, column 2
    np.testing.assert_allclose(patch, pixels[14:28, 28:42] / 127.5 - 1, atol=1e-6)


def test_padding_is_black_on_the_right_and_at_the_bottom():
    white = Image.new("RGB", (30, 20), "white")
    out = TinyKimiImageProcessor(media_proc_cfg=MEDIA).preprocess([{"image": white}])
    sheet = out["pixel_values"].view(2, 4, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert out["grid_thws"].tolist() == [[1, 2, 4]]
    assert bool((sheet[:20, :30] == 1).all())
    assert bool((sheet[20:] == -1).all()) and bool((sheet[:, 30:] == -1).all())


def test_several_images_of_other_modes_are_concatenated():
    images = [Image.new("L", (28, 28)), Image.new("RGBA", (56, 28)), Image.new("P", (2000, 1500))]
    out = TinyKimiImageProcessor(media_proc_cfg=MEDIA).preprocess([{"image": image} for image in images])
    assert out["grid_thws"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 28, 38]]
    assert len(out["pixel_values"]) == 4 + 8 + 28 * 38
