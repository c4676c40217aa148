"""Image admission: what an image costs and whether it is one, before any engine sees it.

The token count is the NaViT rule of Kimi's processor (`media_proc_cfg` in the checkpoint's preprocessor_config.json;
upstream: sglang/srt/multimodal/processors/kimi_k25.py `navit_resize_config`), computed from the header alone.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from deployments.errors import ApiError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True, slots=True)
class MediaRule:
    """Kimi's NaViT resize rule. Patches are squares of `patch_size` px; one token is `merge` x `merge` patches."""

    patch_size: int = 14
    merge: int = 2
    in_patch_limit: int = 16_384
    patch_limit_on_one_side: int = 512

    @classmethod
    def of(cls, model_dir: Path) -> MediaRule:
        """Read the rule of a checkpoint; raises FileNotFoundError or KeyError naming what is missing."""
        config = json.loads((model_dir / "preprocessor_config.json").read_text())["media_proc_cfg"]
        return cls(
            config["patch_size"],
            config["merge_kernel_size"],
            config["in_patch_limit"],
            config["patch_limit_on_one_side"],
        )

    def tokens(self, width: int, height: int) -> int:
        """Rows that an image of `width` x `height` px occupies in the prompt. Images are never enlarged."""
        p, side = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        patches = max(1.0, width // p) * max(1.0, height // p)
        scale = min(1.0, math.sqrt(self.in_patch_limit / patches), side / width, side / height)
        unit = p * self.merge
        new_width = min(max(1, int(width * scale)), side)
        new_height = min(max(1, int(height * scale)), side)
        return math.ceil(new_width / unit) * math.ceil(new_height / unit)


def check_images(parts: list[tuple[str, dict[str, Any]]], rule: MediaRule, max_images: int, max_pixels: int) -> int:
    """Check every image part of a request and return the tokens of all. Blocking: call it in a thread.

    Args:
        parts: (path, content part) as `deployments.request.content_parts` yields them.

    Raises:
        ApiError: 400 with `param` naming the part, for too many, too large, undecodable or unreachable images.
    """
    for path, part in parts:
        if part.get("type") not in ("text", "image_url"):
            raise ApiError(
                400,
                f'{path}: content type {part.get("type")!r} is not supported; use "text" or "image_url".',
                param=f"{path}.type",
                code="invalid_value",
            )
    images = [(path, part) for path, part in parts if part["type"] == "image_url"]
    if len(images) > max_images:
        raise ApiError(
            400,
            f"{len(images)} images in one request; at most {max_images} are allowed.",
            param=images[max_images][0],
            code="too_many_images",
        )
    return sum(rule.tokens(*_size(path, part, max_pixels)) for path, part in images)


def _size(path: str, part: dict[str, Any], max_pixels: int) -> tuple[int, int]:
    field = f"{path}.image_url.url"
    reference = part.get("image_url")
    url = reference.get("url") if isinstance(reference, dict) else None
    if not isinstance(url, str):
        raise ApiError(400, f"{field}: a string is required.", param=field, code="invalid_value")
    data = decode_data_url(url, field)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Image.DecompressionBombWarning
            )  # our own limit follows, lower than Pillow's
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise ApiError(
                    400,
                    f"{field}: {width}x{height} pixels; at most {max_pixels} are allowed. Scale it down.",
                    param=field,
                    code="image_too_large",
                )
            image.load()  # a truncated or corrupt body must fail here, alone, and not in the engine
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ApiError(
            400,
            f"{field}: {len(data)} bytes that are no image we can read (one of {', '.join(FORMATS)}).",
            param=field,
            code="invalid_image",
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ApiError(400, f"{field}: the image is damaged: {error}.", param=field, code="invalid_image") from error
    return width, height


def decode_data_url(url: str, field: str) -> bytes:
    """The bytes of a base64 `data:` URL; ApiError 400 naming `field` otherwise."""
    head, comma, payload = url.partition(",")
    if not head.startswith("data:"):
        raise ApiError(
            400,
            f"{field}: only data: URLs are accepted (data:image/png;base64,...); fetching from the network is off.",
            param=field,
            code="invalid_image_url",
        )
    if not comma or not head.endswith(";base64"):
        raise ApiError(
            400,
            f"{field}: a data: URL must be base64 (data:image/png;base64,...).",
            param=field,
            code="invalid_image_url",
        )
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"{field}: the base64 is broken: {error}.", param=field, code="invalid_base64") from error
