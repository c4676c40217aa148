"""Lossless speculative sampling on a CPU: verify a draft tree against the target's distribution.

Upstream commits the argmax on a CPU whatever the temperature asks (eagle_utils._verify_uses_greedy). Here, at every
node of the tree, one token is drawn from the target's filtered distribution p, and the walk goes on if a child of that
node is that token. This is the chain rule for a deterministic proposal, with the two coins of each child merged into
one draw: a child x is accepted with probability p(x); when all are refused, the emitted token is distributed as p with
the refused children zeroed, renormalised. Every emitted token is a draw from p at its own context, so the law of the
text is the target's, whatever the draft proposes.

The filters are those of SGLang's own sampler on a CPU (sampler.top_k_top_p_min_p_sampling_from_probs_torch): top-k by
rank, then top-p on the sums *before* any renormalisation, then min-p relative to the most likely token.
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kimi_draft.cpu.tree import verify_tree_greedy_cpu

# min_p of each request of the batch being verified, [B] or None; upstream's verify does not hand it on.
_min_ps: ContextVar[Tensor | None] = ContextVar("min_ps", default=None)


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """[R, V] with all but each row's top_ks[r] most likely tokens zeroed; not renormalised."""
    return _keep(probs, lambda ranked: torch.arange(ranked.shape[1]) < top_ks.view(-1, 1))


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """[R, V] with a token zeroed when those more likely than it already sum to more than top_ps[r]."""
    return _keep(probs, lambda ranked: ranked.cumsum(-1) - ranked <= top_ps.view(-1, 1))


def keep_min_p(probs: Tensor, min_ps: Tensor) -> Tensor:
    """[R, V] with all tokens below min_ps[r] times the row's maximum zeroed."""
    floor = probs.amax(-1, keepdim=True) * min_ps.view(-1, 1)
    return probs.masked_fill(probs < floor, 0.0)


def _keep(probs: Tensor, wanted: Any) -> Tensor:
    ranked, token = probs.sort(dim=-1, descending=True)
    return torch.zeros_like(probs).scatter_(-1, token, ranked.masked_fill(~wanted(ranked), 0.0))


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    """[R] int64: a column of each row with probability weights / sum(weights), by inverting the row's running sum.

    weights [R, V] >= 0 with a positive sum; coins [R] in [0, 1). A column of weight 0 is never drawn.
    """
    total = weights.double().cumsum(-1)
    threshold = coins.double().view(-1, 1) * total[:, -1:]
    return torch.searchsorted(total, threshold, right=True).squeeze(1)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Stand-in for the CUDA kernel of this name (kernels/ops/speculative/sampling.py); arguments as there.

    target_probs [B, D, V], filtered but not necessarily normalised; uniform_samples [B, D] in [0, 1), one coin a node;
    the other tensors as verify_tree_greedy_cpu. uniform_samples_for_final_sampling and draft_probs are not needed.

    Raises:
        ValueError: an acceptance threshold below 1, which trades the target's distribution for speed.
    """
    if threshold_single != 1.0 or threshold_acc != 1.0:
        raise ValueError("speculative_accept_threshold_single / _acc below 1 are not lossless; not offered on a CPU")
    batch, nodes, vocab = target_probs.shape
    weights = target_probs.reshape(-1, vocab)
    min_ps = _min_ps.get()
    if min_ps is not None:
        weights = keep_min_p(weights, min_ps.repeat_interleave(nodes))
    chosen = draw(weights, uniform_samples.flatten()).view(batch, nodes)
    verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        chosen,
    )


def hand_on_min_p(upstream: Any) -> Any:
    """Correction for eagle_utils.eagle_sample: the batch's min_p reaches the sampler above."""

    def eagle_sample(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = batch.sampling_info
        wanted = info is not None and info.need_min_p_sampling
        token = _min_ps.set(info.min_ps if wanted else None)
        try:
            return upstream(verify_input, batch, *args, **kwargs)
        finally:
            _min_ps.reset(token)

    return eagle_sample


def verify_uses_greedy(upstream: Any) -> Any:
    """Correction for eagle_utils._verify_uses_greedy: on a CPU too, only when every request is greedy."""

    def _verify_uses_greedy(*, is_all_greedy: bool, **_: bool) -> bool:
        return is_all_greedy

    return _verify_uses_greedy
