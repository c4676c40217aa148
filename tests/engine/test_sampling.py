"""Sampling with speculation on the real engine: the first two tokens follow the target's own distribution."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from kimi_draft.cpu.sampling import keep_min_p, keep_top_k, keep_top_p
from kimi_draft.stats import summarize

DRAWS, WAVE = 1600, 200
TEMPERATURE = 1.3
FILTERS = {"top_k": 5, "top_p": 0.97, "min_p": 0.02}
ALPHA = 1e-5  # the engine's random numbers depend on all that it did before, so a failure must be out of the question


def law(engine: Any, ids: list[int]) -> dict[int, float]:
    """The target's filtered distribution of the token after ids, from its log-probabilities."""
    params = {"temperature": TEMPERATURE, "max_new_tokens": 1}
    answer = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=400)
    listed = answer["meta_info"]["output_top_logprobs"][0]
    probs = torch.tensor([[math.exp(logprob) for logprob, _, _ in listed]])
    kept = keep_top_p(keep_top_k(probs, torch.tensor([FILTERS["top_k"]])), torch.tensor([FILTERS["top_p"]]))
    kept = keep_min_p(kept, torch.tensor([FILTERS["min_p"]]))[0]
    return {token: float(p / kept.sum()) for (_, token, _), p in zip(listed, kept, strict=True) if p > 0}


def p_value(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square over pairs, those expected fewer than five times pooled."""
    draws = sum(seen.values())
    large = [pair for pair, p in expected.items() if p * draws >= 5]
    observed = [seen[pair] for pair in large] + [draws - sum(seen[pair] for pair in large)]
    wanted = [expected[pair] * draws for pair in large]
    wanted.append(max(draws - sum(wanted), 1e-9))
    return float(chisquare(observed, wanted, sum_check=False).pvalue)


HOT = {"temperature": TEMPERATURE, "max_new_tokens": 2, "ignore_eos": True, **FILTERS}


def draw_pairs(engine: Any, ids: list[int], count: int) -> tuple[Counter[tuple[int, ...]], float]:
    """The first two tokens of `count` answers, and how many of them had the second one from an accepted draft."""
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(0, count, WAVE):
        for answer in engine.generate(input_ids=[ids] * min(WAVE, count), sampling_params=HOT):
            seen[tuple(answer["output_ids"])] += 1
            accepted += summarize(answer["meta_info"])["first_chain_accepted"] > 0
    return seen, accepted / count


@pytest.fixture(scope="module")
def ids(tiny_engine: Any) -> list[int]:
    """A prompt after which drafts are accepted and refused, whatever weights are shipped."""
    encode = tiny_engine.tokenizer_manager.tokenizer.encode
    for text in (
        "Repeat: red blue.",
        "red green blue red green",
        "I see: two",
        "The first one",
        "Read the cells in",
        "a",
    ):
        ids = list(encode(text))
        _, rate = draw_pairs(tiny_engine, ids, 60)
        if 0.1 < rate < 0.9 and len(law(tiny_engine, ids)) > 1:
            return ids
    pytest.fail("no prompt with both acceptance and refusal")


def test_pairs_of_tokens(tiny_engine: Any, ids: list[int]) -> None:
    first = law(tiny_engine, ids)
    expected = {(a, b): p * q for a, p in first.items() for b, q in law(tiny_engine, [*ids, a]).items()}
    seen, rate = draw_pairs(tiny_engine, ids, DRAWS)
    assert set(seen) <= set(expected), "a filtered token was emitted"
    assert 0.02 < rate < 0.98, "both acceptance and refusal must occur"
    assert p_value(seen, expected) > ALPHA
    greedy_second = Counter({(a, max(law(tiny_engine, [*ids, a]).items(), key=lambda i: i[1])[0]): round(p * DRAWS)
                             for a, p in first.items()})  # fmt: skip
    assert p_value(greedy_second, expected) < ALPHA, "upstream's argmax on a CPU would have been noticed"


def test_greedy_and_sampled_side_by_side(tiny_engine: Any, ids: list[int]) -> None:
    """A greedy request in a batch with hot ones is still greedy."""
    greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    alone = tiny_engine.generate(input_ids=ids, sampling_params=greedy)["output_ids"]
    params = [greedy if i % 3 == 0 else greedy | {"temperature": 2.0} for i in range(9)]
    answers = tiny_engine.generate(input_ids=[ids] * 9, sampling_params=params)
    assert all(a["output_ids"] == alone for i, a in enumerate(answers) if i % 3 == 0)
    assert len({tuple(a["output_ids"]) for a in answers}) > 4
