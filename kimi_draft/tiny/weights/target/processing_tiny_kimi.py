"""Image processor and processor of the tiny Kimi-K2.5, loaded by `trust_remote_code` from the checkpoint's own folder.

It has the surface of the real Kimi-K2.5 processor that SGLang uses on the CPU: `media_processor` with `media_proc_cfg`
and `media_tokens_calculator`, and a call with `medias=[{"type": "image", "image": PIL.Image}]`.
"""

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


def navit_size(width: int, height: int, config: dict[str, Any]) -> tuple[int, int, int, int]:
    """NaViT rule: the resized width and height, and the padding on the right and at the bottom, in pixels.

    Pictures are only ever made smaller, so that they hold at most ``in_patch_limit`` patches (before padding) and
    ``patch_limit_on_one_side`` along a side; then both sides are padded to a whole merged patch.
    """
    patch, side = config["patch_size"], config["patch_limit_on_one_side"] * config["patch_size"]
    patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(config["in_patch_limit"] / patches), side / width, side / height)
    new_width = min(max(1, int(width * scale)), side)
    new_height = min(max(1, int(height * scale)), side)
    unit = patch * config["merge_kernel_size"]
    return new_width, new_height, -new_width % unit, -new_height % unit


class TinyKimiImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Resize (bicubic), pad with black, scale to [-1, 1] and cut into patches."""

    model_input_names = ["pixel_values", "grid_thws"]  # noqa: RUF012 - transformers' own class attribute

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """Number of image tokens of one ``{"image": PIL.Image}``."""
        config = self.media_proc_cfg
        width, height, right, bottom = navit_size(media["image"].width, media["image"].height, config)
        unit = config["patch_size"] * config["merge_kernel_size"]
        return int((width + right) // unit * ((height + bottom) // unit))

    def preprocess(
        self, medias: list[dict[str, Any]], return_tensors: str | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Patches of all images [sum(h*w), 3, patch, patch] float32, row-major, and grids [images, 3] (1, h, w)."""
        patches, grids = zip(*(self._cut(media["image"]) for media in medias), strict=True)
        return BatchFeature({"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)})

    def _cut(self, image: Image.Image) -> tuple[torch.Tensor, list[int]]:
        config = self.media_proc_cfg
        patch = config["patch_size"]
        width, height, right, bottom = navit_size(image.width, image.height, config)
        rgb = image.convert("RGB")
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
        # Raw zeros first, normalisation after: padding is black (-1), as in the real processor.
        pixels = np.pad(np.asarray(rgb, dtype=np.float32), ((0, bottom), (0, right), (0, 0)))
        mean, std = np.float32(config["image_mean"]), np.float32(config["image_std"])
        pixels = (pixels / np.float32(255) - mean) / std
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return torch.from_numpy(cut.reshape(-1, 3, patch, patch).copy()), [1, rows, columns]


class TinyKimiProcessor(ProcessorMixin):  # type: ignore[misc]
    """Tokenizer and image processor together."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @property
    def media_processor(self) -> TinyKimiImageProcessor:
        """The image processor, under the name that the real processor gives it."""
        return self.image_processor  # type: ignore[no-any-return]

    def __call__(
        self, text: Any = None, medias: list[dict[str, Any]] | None = None, return_tensors: str = "pt", **kwargs: Any
    ) -> BatchFeature:
        """Token ids of the text as it is (placeholders not repeated) and, with medias, their pixels."""
        features = dict(self.tokenizer(text, return_tensors=return_tensors))
        if medias:
            features.update(self.image_processor.preprocess(medias))
        return BatchFeature(features)
