"""Image admission: costs from the header, and errors that name the part."""

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deployments.errors import ApiError
from deployments.images import MediaRule, check_images

KIMI = MediaRule()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def part(url: object, path: str = "messages.0.content.0") -> list[tuple[str, dict]]:
    return [(path, {"type": "image_url", "image_url": {"url": url}})]


GOOD = data_url(Image.new("RGB", (84, 56)))
_NOISE = base64.b64decode(data_url(Image.effect_noise((64, 64), 50)).partition(",")[2])
TRUNCATED = "data:image/png;base64," + base64.b64encode(_NOISE[: len(_NOISE) // 2]).decode()


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    # Kimi-K2.5's published rule on common sizes
    [
        (224, 224, 64),
        (448, 448, 256),
        (640, 360, 299),
        (1024, 768, 1036),
        (1280, 720, 1196),
        (1024, 1024, 1369),
        (1920, 1080, 2691),
        (3840, 2160, 4214),
    ],
)
def test_tokens_of_common_sizes(width: int, height: int, tokens: int) -> None:
    assert KIMI.tokens(width, height) == tokens


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_tokens_are_bounded(width: int, height: int) -> None:
    # the padding to whole tokens may pass the nominal patch limit by one row and one column
    assert 1 <= KIMI.tokens(width, height) <= (KIMI.in_patch_limit / 4) + 2 * KIMI.patch_limit_on_one_side


def test_a_good_image_costs_its_tokens() -> None:
    assert check_images(part(GOOD) + part(GOOD), KIMI, 8, 10**6) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,@@@@", "invalid_base64"),
        ("data:image/png;base64,aGVsbG8gd29ybGQ=", "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        (TRUNCATED, "invalid_image"),
        ("data:image/png,rawbytes", "invalid_image_url"),
        ("https://example.com/cat.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        (None, "invalid_value"),
        (17, "invalid_value"),
    ],
)
def test_bad_images_are_named(url: object, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_images(part(url, "messages.3.content.1"), KIMI, 8, 10**6)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.param == "messages.3.content.1.image_url.url"


def test_too_many_and_too_large() -> None:
    with pytest.raises(ApiError) as caught:
        check_images(part(GOOD) * 3, KIMI, 2, 10**6)
    assert caught.value.code == "too_many_images"
    with pytest.raises(ApiError) as caught:
        check_images(part(GOOD), KIMI, 2, 84 * 56 - 1)
    assert caught.value.code == "image_too_large"


@pytest.mark.parametrize("kind", ["input_image", "video_url", "audio_url", "", None, 3])
def test_other_kinds_of_parts_are_refused_by_name(kind: object) -> None:
    with pytest.raises(ApiError, match="image_url") as caught:
        check_images([("messages.0.content.0", {"type": kind})], KIMI, 8, 10**6)
    assert caught.value.param == "messages.0.content.0.type"
