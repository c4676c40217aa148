"""The draft's input rows: shift by one inside every request of a flat batch.

EAGLE's draft reads, at position i, the target's hidden state of token i and the *embedding of token i + 1*. For a batch
of requests laid end to end that is a shift by one which must not cross a request's end: the last row of each request
takes the embedding of its own next token. Public releases had this wrong in several ways (docs/upstream.md).
"""

import torch
from torch import Tensor


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
    n = target_embeds.shape[0]
    end = extend_start_loc + extend_seq_lens
    owns = extend_seq_lens.clamp(max=1)
    # +1 where a request begins, -1 behind its end: the running sum is 1 inside and 0 in padding.
    edge = owns.new_zeros(n + 1).index_add_(0, extend_start_loc, owns).index_add_(0, end, owns, alpha=-1)
    padding = edge.cumsum(0)[:n] == 0
    # One scratch row at the end takes the tails of empty requests. It and row n-1 start out uninitialised: the one is
    # cut off again, the other is some request's last row, or padding.
    out = target_embeds.new_empty(n + 1, target_embeds.shape[1])
    out[: max(n - 1, 0)].copy_(target_embeds[1:])
    last = (end - 1).masked_fill_(extend_seq_lens == 0, n)
    out.index_copy_(0, last.long(), tail_embeds.to(out.dtype))
    return out[:n].masked_fill_(padding[:, None], 0)
