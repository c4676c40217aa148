"""The draft's input rows: shift by one inside every request of a flat batch.

EAGLE's draft reads, at position i, the target's hidden state of token i and the *embedding of token i + 1*. For a batch
of requests laid end to end that is a shift by one which must not cross a request's end: the last row of each request
takes the embedding of its own next token. Public releases had this wrong in several ways (docs/upstream.md).
"""

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def next_token_embeds(
    target_embeds: Tensor, extend_start_loc: Tensor, extend_seq_lens: Tensor, tail_embeds: Tensor
) -> Tensor:
    """The draft's input rows of one extend batch.

    Args:
        target_embeds: [N, H], the target's own input embeddings, vision rows included. Rows that no request owns
            (between requests or behind the last) are padding.
        extend_start_loc: [B] integer, the first row of each request; any value in [0, N] for an empty one.
        extend_seq_lens: [B] integer, the rows of each request; 0 is legal and owns no row.
        tail_embeds: [B, H], the embedding of the token that follows each request's last row.

    Returns:
        A new [N, H] tensor of target_embeds' dtype: row start+j is target_embeds[start+j+1] for j < len-1 and
        tail_embeds[b] for j = len-1; padding rows are zero.

    The inputs are never written. There is no host synchronisation and the number of kernel launches does not depend on
    B, so it may run under CUDA-graph capture. Source: EAGLE-3 (arXiv:2503.01840), section 3.
    """
    n, hidden = target_embeds.shape
    owns = torch.gt(extend_seq_lens, 0, out=extend_seq_lens.new_empty(extend_seq_lens.shape, dtype=torch.int64))
    end = torch.addcmul(extend_seq_lens, extend_start_loc, owns)  # start + len; 0 for an empty request
    # -1 where a request begins, +1 behind its end: the running sum has all bits set inside and none in padding.
    edge = owns.new_zeros(n + 1).index_add_(0, extend_start_loc, owns, alpha=-1).index_add_(0, end, owns)
    # One row more in front, so that a request's last row is row `end`, and row 0 takes the tails of empty requests.
    rows = target_embeds.new_empty(n + 1, hidden)
    rows[n:].zero_()  # no row follows the last: it is some request's tail, or padding
    word = _word(target_embeds)
    inside = edge.cumsum(0, dtype=word)[: max(n - 1, 0), None]
    torch.bitwise_and(target_embeds[1:].view(word), inside, out=rows[1:n].view(word))
    rows.index_copy_(0, end, tail_embeds.to(rows.dtype))
    return rows[1:]


def _word(rows: Tensor) -> torch.dtype:
    """The widest integer that the rows can be seen as: a mask zeroes NaN too, and is quicker than masked_fill_."""
    steps = (rows.shape[1], rows.stride(0), rows.storage_offset(), 1 if rows.stride(1) != 1 else 0)
    return next(w for w in _WORDS if all(step * rows.itemsize % w.itemsize == 0 for step in steps))
