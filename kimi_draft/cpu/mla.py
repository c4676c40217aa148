"""MLA attention on a CPU, as two pure functions: which cache slots a query row may read, and the attention itself.

In MLA's absorbed form every head reads the same cached row: key = (latent, rope part), value = the latent alone, i.e.
the key's first v_head_dim columns. So one gather serves all heads and both operands.

A batch is padded to a rectangle, so that one call per layer does for all its requests what a loop would do one by one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A rectangle may hold this many times the (query, key) pairs that are really needed before it is split by request.
MAX_PADDING = 1.5
# ... unless it is small anyway: below this many pairs the fixed cost of a call outweighs the padding.
SMALL_RECTANGLE = 1 << 12


@dataclass(frozen=True)
class Rectangle:
    """The part of a flat batch that is attended to in one call.

    rows [R, Q] int64: flat query rows, padded by repeating a request's first row; slots [R, K] int64: cache slots,
    padded with slot 0; mask [R, Q, K] bool: True = may read; packed [R, Q] bool: True = not padding. R is the number
    of requests (or draft branches) in the rectangle.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor
    packed: Tensor


def rectangle(start: Tensor, q_lens: Tensor, table: Tensor, kv_lens: Tensor, tree: Tensor | None = None) -> Rectangle:
    """Queries are the last q_lens[r] of the kv_lens[r] tokens of row r, flat from start[r]; each sees what precedes it.

    start, q_lens, kv_lens [R] int64; table [R, >= max kv_lens]: cache slot of each position. tree [R, Q, Q] bool, for
    uniform q_lens == Q only, replaces the causal pattern among the queries themselves: tree[r, i, j] = i may see j.
    """
    q_max, k_max = int(q_lens.max()), int(kv_lens.max())
    query, key = torch.arange(q_max), torch.arange(k_max)
    packed = query < q_lens[:, None]
    first = kv_lens - q_lens
    mask = key <= (first[:, None] + query)[:, :, None]  # what padding queries see is thrown away
    if tree is not None:
        column = (key - first[:, None])[:, None, :].expand(-1, q_max, -1)
        among = tree.gather(2, column.clamp(0, q_max - 1))
        mask = torch.where((column >= 0) & (column < q_max), among, mask & (column < 0))
    rows = torch.where(packed, start[:, None] + query, start[:, None])
    slots = table[:, :k_max].long() * (key < kv_lens[:, None])
    return Rectangle(rows, slots, mask, packed)


def split(q_lens: list[int], kv_lens: list[int]) -> list[list[int]]:
    """Group requests into rectangles: similar shapes together, at most MAX_PADDING times the pairs really needed.

    Returns lists of request numbers; requests with no query are in none.
    """
    groups: list[list[int]] = []
    needed = q_max = k_max = 0
    for r in sorted((r for r, q in enumerate(q_lens) if q), key=lambda r: (q_lens[r], kv_lens[r])):
        q, k = q_lens[r], kv_lens[r]
        area = max(q_max, q) * max(k_max, k) * (len(groups[-1]) + 1 if groups else 1)
        if groups and area <= max(SMALL_RECTANGLE, MAX_PADDING * (needed + q * k)):
            groups[-1].append(r)
            needed, q_max, k_max = needed + q * k, max(q_max, q), max(k_max, k)
        else:
            groups.append([r])
            needed, q_max, k_max = q * k, q, k
    return groups


def attend(query: Tensor, cache: Tensor, plan: list[Rectangle], scaling: float, v_head_dim: int) -> Tensor:
    """softmax(q k^T * scaling) v over each rectangle; returns [N, H, v_head_dim] of the query's dtype.

    query [N, H, D]; cache [slots, D], any float dtype; computed in float32. Rows in no rectangle come out as zeros.
    """
    heads, dim = query.shape[1:]
    out = query.new_zeros(query.shape[0], heads, v_head_dim)
    for part in plan:
        count, q_max = part.rows.shape
        kv = cache[part.slots].float()
        # All heads read the same keys, so heads and queries are the rows of one matrix product: [R, Q * H, D].
        q = (query[part.rows].float() * scaling).view(count, q_max * heads, dim)
        scores = torch.bmm(q, kv.transpose(1, 2)).view(count, q_max, heads, -1)
        scores.masked_fill_(~part.mask[:, :, None], -torch.inf)
        weights = scores.softmax(-1).view(count, q_max * heads, -1)
        o = torch.bmm(weights, kv[..., :v_head_dim]).view(count, q_max, heads, v_head_dim)
        out[part.rows[part.packed]] = o[part.packed].to(out.dtype)
    return out
