"""Batches for training and evaluation: exactly the token ids that the served model sees, and the images' patches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kimi_draft.tiny import tokenizer
from kimi_draft.tiny.config import MEDIA, MERGE
from kimi_draft.tiny.picture import Cells
from kimi_draft.tiny.processing_tiny_kimi import TinyKimiImageProcessor
from kimi_draft.tiny.task import Example, sample
from kimi_draft.tiny.template import render


@dataclass
class Row:
    """One example as token ids; ``prompt`` counts the ids before the answer, placeholders repeated."""

    example: Example
    ids: list[int]
    prompt: int


@dataclass
class Batch:
    """A padded batch. Answers lie in ``prompt`` <= position < ``length``; ``rows`` picks the image rows it needs."""

    examples: list[Example]
    ids: torch.Tensor  # [batch, longest] int64, [PAD] on the right
    prompt: torch.Tensor  # [batch]
    length: torch.Tensor  # [batch]
    rows: torch.Tensor | None  # [image tokens of this batch] index into the image rows of the whole step

    def predicts(self, ahead: int = 1) -> torch.Tensor:
        """[batch, longest] bool: positions p >= prompt - 1 whose token p + ahead is part of the answer."""
        at = torch.arange(self.ids.shape[1])[None]
        return (at >= self.prompt[:, None] - 1) & (at + ahead < self.length[:, None])


@dataclass
class Step:
    """Micro-batches that share one pass of the vision tower."""

    batches: list[Batch]
    pixels: torch.Tensor | None  # [patches, 3, 14, 14]
    grid: torch.Tensor | None  # [images, 3]
    truth: torch.Tensor | None  # [image tokens, 4]: colour, shape, row, column (for the auxiliary loss)


def encode(example: Example) -> Row:
    """Prompt and answer as ids. Both are tokenized apart, as in serving, where the answer is generated."""
    coder = tokenizer.build()
    pad = tokenizer.token_id("<|media_pad|>")
    text = render([{"role": "user", "content": example.parts}], example.tools, example.thinking)
    sizes = iter(grid.shape[0] * grid.shape[1] for grid in example.grids)
    prompt: list[int] = []
    for token in coder.encode(text).ids:
        prompt += [pad] * next(sizes) if token == pad else [token]
    answer = [*coder.encode(example.completion).ids, tokenizer.token_id("<|im_end|>")]
    return Row(example, prompt + answer, len(prompt))


def draw(seed: int, step: int, count: int, shares: dict[str, float] | None = None) -> list[Example]:
    """The examples of one step: a function of (seed, step) only, so a resumed or shortened run sees the same data."""
    rng = np.random.default_rng((seed, step))
    if shares is None:
        return [sample(rng) for _ in range(count)]
    kinds = rng.choice(list(shares), size=count, p=list(shares.values()))
    return [sample(rng, str(kind)) for kind in kinds]


def collate(examples: Sequence[Example], micro: int = 1) -> Step:
    """Sort by length, cut into ``micro`` padded batches, and gather the images of all of them."""
    rows = sorted((encode(example) for example in examples), key=lambda row: len(row.ids))
    images = [(r, i, grid) for r, row in enumerate(rows) for i, grid in enumerate(row.example.grids)]
    images.sort(key=lambda item: item[2].shape[:2])  # equal sizes side by side: one attention call for each size
    start, offset = {}, 0
    for r, i, grid in images:
        start[r, i] = offset
        offset += grid.shape[0] * grid.shape[1]

    batches = []
    for part in np.array_split(np.arange(len(rows)), micro):
        longest = max(len(rows[r].ids) for r in part)
        ids = torch.full((len(part), longest), tokenizer.token_id("[PAD]"))
        index = []
        for k, r in enumerate(part):
            ids[k, : len(rows[r].ids)] = torch.tensor(rows[r].ids)
            for i, grid in enumerate(rows[r].example.grids):
                index.append(torch.arange(start[r, i], start[r, i] + grid.shape[0] * grid.shape[1]))
        batches.append(
            Batch(
                examples=[rows[r].example for r in part],
                ids=ids,
                prompt=torch.tensor([rows[r].prompt for r in part]),
                length=torch.tensor([len(rows[r].ids) for r in part]),
                rows=torch.cat(index) if index else None,
            )
        )
    if not images:
        return Step(batches, None, None, None)
    medias = [{"image": rows[r].example.images[i]} for r, i, _ in images]
    features = processor().preprocess(medias)
    truth = torch.cat([_truth(grid) for _, _, grid in images])
    return Step(batches, features["pixel_values"], features["grid_thws"], truth)


def processor() -> TinyKimiImageProcessor:
    """The image processor with the shipped limits."""
    return TinyKimiImageProcessor(media_proc_cfg=MEDIA | {"merge_kernel_size": MERGE})


def _truth(grid: Cells) -> torch.Tensor:
    rows, columns = grid.shape[:2]
    row, column = np.divmod(np.arange(rows * columns), columns)
    return torch.from_numpy(np.concatenate([grid.reshape(-1, 2), np.stack([row, column], -1)], -1))
