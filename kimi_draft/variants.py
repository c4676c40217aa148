"""The draft's input rows as we compute them, and as public releases got them wrong.

The wrong ones exist to be measured: they change only which rows the draft sees for batches with images or unfinished
prompts, hence only how well it guesses; the text is the target's in every variant.
"""

import os
from collections.abc import Callable
from enum import StrEnum

from torch import Tensor

from kimi_draft.embeds import next_token_embeds
from kimi_draft.tails import TailFunction, next_tokens, upstream_next_tokens

ENV = "KIMI_DRAFT_VARIANT"


class Variant(StrEnum):
    """What runs as the draft's extend; set with KIMI_DRAFT_VARIANT, `corrected` by default."""

    CORRECTED = "corrected"
    UPSTREAM = "upstream"  # SGLang 0.5.23's own code, untouched
    UPSTREAM_TAILS = "upstream_tails"  # corrected rows, but SGLang 0.5.23's idea of what follows an unfinished prompt
    LAST_REQUEST_ONLY = "last_request_only"  # before 0.5.14: only the batch's very last row gets its next token
    UNROTATED = "unrotated"  # before 0.5.20: row i holds token i's embedding, except each last row
    BOTH = "both"  # as released in 0.5.12


def current() -> Variant:
    """Raises ValueError for an unknown name."""
    name = os.environ.get(ENV, Variant.CORRECTED)
    if name not in list(Variant):
        raise ValueError(f"{ENV}={name!r}: choose one of {', '.join(Variant)}")
    return Variant(name)


RowFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _last_rows(start: Tensor, lens: Tensor) -> Tensor:
    return (start + lens - 1).long()


def last_request_only(embeds: Tensor, start: Tensor, lens: Tensor, tails: Tensor) -> Tensor:
    rows = next_token_embeds(embeds, start, lens, tails)
    stale = _last_rows(start, lens)[:-1]
    return rows.index_copy(0, stale, embeds[stale])


def unrotated(embeds: Tensor, start: Tensor, lens: Tensor, tails: Tensor) -> Tensor:
    return embeds.index_copy(0, _last_rows(start, lens), tails)


def both(embeds: Tensor, start: Tensor, lens: Tensor, tails: Tensor) -> Tensor:
    return embeds.index_copy(0, _last_rows(start, lens)[-1:], tails[-1:])


def row_function(variant: Variant) -> RowFunction:
    """(target_embeds, start, lens, tail_embeds) -> rows, as next_token_embeds; not defined for UPSTREAM."""
    return {
        Variant.CORRECTED: next_token_embeds,
        Variant.UPSTREAM_TAILS: next_token_embeds,
        Variant.LAST_REQUEST_ONLY: last_request_only,
        Variant.UNROTATED: unrotated,
        Variant.BOTH: both,
    }[variant]


def tail_function(variant: Variant) -> TailFunction:
    """Only CORRECTED knows what follows an unfinished prompt; the historic ones are compared on whole prompts."""
    return next_tokens if variant is Variant.CORRECTED else upstream_next_tokens


def rotate_ids(ids: Tensor, start: Tensor, lens: Tensor, tails: Tensor) -> Tensor:
    """Token ids [N] -> the next token's id at every row, tails [B] at each last row, 0 in padding."""
    return next_token_embeds(ids[:, None], start, lens, tails.to(ids.dtype)[:, None]).squeeze(1)
