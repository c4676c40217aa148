"""What follows each request's last row: the token just sampled, or the next token of a prompt that goes on.

Upstream (eagle_utils.py:81, schedule_batch.py:2438) looks at one request of the batch, at its original prompt and at
text only. So it takes the sampled token, which is then thrown away, where an image goes on or begins behind the cut,
and where a retracted request is resumed and cut among its own output tokens. The draft's key at that row is wrong, and
the radix tree hands it to every later request with the same prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageTail:
    """A last row that is followed by a piece of an image: request `index` of the batch, whose images are `mm_inputs`,
    goes on at `position` with the placeholder id `token`."""

    index: int
    position: int
    token: int
    mm_inputs: Any


@dataclass(frozen=True)
class Tails:
    """ids [B]: the next token of each request, a legal row of the embedding table also where `images` overrides it."""

    ids: Tensor
    images: tuple[ImageTail, ...] = ()


TailFunction = Callable[[Any, Tensor], Tails]


def next_tokens(batch: Any, sampled: Tensor) -> Tails:
    """The tails of an extend batch (SGLang's ScheduleBatch); sampled [B] integer, what the target sampled.

    Nothing is copied to the device unless some prompt goes on, and then once, however many do.
    """
    ids: list[int] = []
    images: list[ImageTail] = []
    top = batch.model_config.vocab_size - 1
    for index, (req, prefix, rows) in enumerate(zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)):
        end = prefix + rows
        known = req.full_untruncated_fill_ids  # the prompt, and behind it the output of a resumed request
        token = int(known[end]) if end < len(known) else -1
        if token > top:  # SGLang fills images with ids above the vocabulary, one for each image's hash
            images.append(ImageTail(index, end, token, req.multimodal_inputs))
        ids.append(min(token, top))
    sampled = sampled.to(batch.input_ids.dtype)
    if max(ids, default=-1) < 0:
        return Tails(sampled)
    prompt = torch.tensor(ids, dtype=sampled.dtype, pin_memory=sampled.is_cuda).to(sampled.device, non_blocking=True)
    return Tails(torch.where(prompt < 0, sampled, prompt), tuple(images))


def upstream_next_tokens(batch: Any, sampled: Tensor) -> Tails:
    """As SGLang 0.5.23 has it, to be measured."""
    from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

    return Tails(_eagle_prefill_tail_tokens(batch, sampled))


def embed(tails: Tails, embed_tokens: Any, target_model: Any) -> Tensor:
    """[B, H]: the embedding of each tail, the vision tower's row where an image follows.

    Such a row is not among the target's embeddings of this batch. SGLang's own routine is asked for it as for an extend
    of one token: it finds the image in the embedding cache, or encodes it (and leaves it there for the next chunk). All
    ranks of a tensor-parallel group ask alike, because they schedule alike.
    """
    from sglang.srt.managers.mm_utils import embed_mm_inputs

    rows: Tensor = embed_tokens(tails.ids)
    for tail in tails.images:  # one by one: the routine takes no mixture of pixels and ready embeddings
        row, _ = embed_mm_inputs(
            mm_inputs_list=[tail.mm_inputs],
            extend_prefix_lens=[tail.position],
            extend_seq_lens=[1],
            input_ids=torch.full((1,), tail.token, dtype=torch.int64, device=rows.device),
            input_embedding=embed_tokens,
            multimodal_model=target_model,
        )
        rows[tail.index] = row[0]
    return rows
