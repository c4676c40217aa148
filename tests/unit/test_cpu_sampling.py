"""Sampling with speculation follows the target's distribution, whatever the draft proposes."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kimi_draft.cpu import sampling
from kimi_draft.cpu.sampling import draw, keep_min_p, keep_top_k, keep_top_p, tree_speculative_sampling_target_only

VOCAB = 6
DRAWS = 40_000


def law(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(*shape, VOCAB, generator=generator) * 1.5).softmax(-1)


def fits(counts: Tensor, expected: Tensor) -> float:
    """p-value of a chi-square test; cells that expect under five draws are pooled, impossible ones must be empty."""
    assert not counts[expected == 0].any(), "a token of probability 0 was drawn"
    small = expected < 5
    observed = [*counts[~small].tolist(), int(counts[small].sum())]
    wanted = [*expected[~small].tolist(), float(expected[small].sum())]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted, sum_check=False).pvalue)


# A root with children 1 and 2 (tokens 3 and 0), and node 3 (token 5) below node 1.
TREE = {"tokens": [[4, 3, 0, 5]], "next": [[1, 3, -1, -1]], "sibling": [[-1, 2, -1, -1]], "depth": 3}
CHAIN = {"tokens": [[4, 3, 5, 1]], "next": [[1, 2, 3, -1]], "sibling": [[-1, -1, -1, -1]], "depth": 4}


def emitted(shape: dict, probs: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """The first two tokens that each of `draws` verifies emits ([draws, 2], -1 for none), and the accepted counts."""
    generator = torch.Generator().manual_seed(seed)
    nodes = probs.shape[0]
    accepted = torch.full((draws, shape["depth"]), -1, dtype=torch.int32)
    predicts = torch.zeros(draws * nodes, dtype=torch.int32)
    counts = torch.empty(draws, dtype=torch.int32)
    tree_speculative_sampling_target_only(
        predicts,
        accepted,
        counts,
        torch.tensor(shape["tokens"]).expand(draws, -1),
        torch.arange(draws * nodes).view(draws, nodes),
        torch.tensor(shape["next"]).expand(draws, -1),
        torch.tensor(shape["sibling"]).expand(draws, -1),
        torch.rand(draws, nodes, generator=generator),
        torch.rand(draws, generator=generator),
        probs.expand(draws, -1, -1),
        torch.zeros(draws, nodes, VOCAB),
    )
    path = accepted[:, :2].long()
    return torch.where(path >= 0, predicts[path.clamp_min(0)].long(), -1), counts


@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=["tree", "chain"])
def test_the_law_is_the_targets(shape: dict) -> None:
    """Token one at the root, token two at each child that was accepted: both by chi-square, and their rates exactly."""
    probs = law(torch.Generator().manual_seed(3), 4)
    tokens, counts = emitted(shape, probs, DRAWS, seed=4)
    first = torch.bincount(tokens[:, 0], minlength=VOCAB)
    assert fits(first, probs[0] * DRAWS) > 1e-3
    for child in (c for c in (1, 2) if c == shape["next"][0][0] or shape["sibling"][0][1] == c):
        after = tokens[tokens[:, 0] == shape["tokens"][0][child], 1]
        assert (after >= 0).all(), "an accepted draft is followed by another token"
        assert fits(torch.bincount(after, minlength=VOCAB), probs[child] * after.numel()) > 1e-3
    rate = float((counts > 0).float().mean())
    children = [t for c, t in enumerate(shape["tokens"][0]) if c in (1, 2) and (shape is TREE or c == 1)]
    expected = float(probs[0, children].sum())
    assert abs(rate - expected) < 4 * (expected * (1 - expected) / DRAWS) ** 0.5


def test_the_argmax_does_not_follow_the_targets_law() -> None:
    """What upstream does on a CPU; shows that the test above can fail."""
    probs = law(torch.Generator().manual_seed(3), 4)
    greedy = torch.nn.functional.one_hot(probs.argmax(-1), VOCAB).float()
    tokens, _ = emitted(CHAIN, greedy, 2000, seed=4)
    counts = torch.bincount(tokens[:, 0], minlength=VOCAB)
    assert chisquare(counts.tolist(), (probs[0] * 2000).tolist(), sum_check=False).pvalue < 1e-6


def test_same_coins_same_tokens() -> None:
    probs = law(torch.Generator().manual_seed(5), 4)
    assert torch.equal(emitted(TREE, probs, 50, seed=6)[0], emitted(TREE, probs, 50, seed=6)[0])


def test_two_coins_a_child_give_the_same_law() -> None:
    """The chain rule written out (accept child x with p(x), else zero it, renormalise, go on) has the same law."""
    p = law(torch.Generator().manual_seed(7), 1)[0]
    children, generator = [3, 0], torch.Generator().manual_seed(8)
    ruled = torch.zeros(VOCAB)
    for _ in range(8000):
        left = p.clone()
        for child in children:
            if float(torch.rand((), generator=generator)) < float(left[child] / left.sum()):
                ruled[child] += 1
                break
            left[child] = 0
        else:
            ruled[int(torch.multinomial(left, 1, generator=generator))] += 1
    assert fits(ruled, p * 8000) > 1e-3


@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0, 3.0, 0.0], [0.0, 0.0, 2.0], [5.0]])
def test_draw_never_picks_a_zero(weights: list[float]) -> None:
    coins = torch.tensor([0.0, 0.25, 0.2499, 0.5, 1 - 2**-24])
    found = draw(torch.tensor(weights).expand(len(coins), -1), coins)
    assert all(weights[i] > 0 for i in found.tolist())


def filtered_by_loop(p: list[float], k: int, top_p: float, min_p: float) -> list[float]:
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept, before = [], 0.0
    for rank, i in enumerate(order):
        if rank < k and before <= top_p and p[i] >= min_p * p[order[0]]:
            kept.append(i)
        before += p[i]
    return [p[i] if i in kept else 0.0 for i in range(len(p))]


def test_filters_against_a_loop() -> None:
    probs = law(torch.Generator().manual_seed(9), 200).double()
    ks = torch.arange(200) % VOCAB + 1
    top_ps, min_ps = torch.linspace(0.05, 1, 200).double(), torch.linspace(0.9, 0, 200).double()
    found = keep_min_p(keep_top_p(keep_top_k(probs, ks), top_ps), min_ps)
    for row, k, top_p, min_p, result in zip(probs, ks, top_ps, min_ps, found, strict=True):
        assert result.tolist() == filtered_by_loop(row.tolist(), int(k), float(top_p), float(min_p))


def test_min_p_reaches_the_sampler() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2 - 2e-6, 1e-6, 1e-6, 0.0]]).expand(4, -1)
    seen = []

    def upstream(verify_input, batch):  # type: ignore[no-untyped-def]
        seen.append(emitted(CHAIN, probs, 3000, seed=1)[0][:, 0].unique().tolist())

    class Info:
        need_min_p_sampling, min_ps = True, torch.full((3000,), 0.5)

    class Batch:
        sampling_info = Info()

    sampling.hand_on_min_p(upstream)(None, Batch())
    Batch.sampling_info.need_min_p_sampling = False
    sampling.hand_on_min_p(upstream)(None, Batch())
    assert seen == [[0, 1], [0, 1, 2]]


def test_thresholds_are_refused() -> None:
    nothing = torch.zeros(1)
    with pytest.raises(ValueError, match="not lossless"):
        tree_speculative_sampling_target_only(*[nothing] * 11, threshold_single=0.9)
