"""Greedy answers with the draft are the target's own, alone and batched, and the statistics tell what happened."""

from typing import Any

import pytest

from kimi_draft.stats import summarize
from tests.engine.conftest import CHUNK, GREEDY, PLACEHOLDER, Bench, TargetOnly, picture

TEXTS = ["Repeat: red blue green.", "Which is last: red blue?", "red " * (2 * CHUNK + 40), "x"]
IMAGES = [
    (f"{PLACEHOLDER}What is in A1?", [picture(1)]),
    (f"{PLACEHOLDER}Read the cells in any order.", [picture(2, 112, 56)]),
    (f"1:{PLACEHOLDER}2:{PLACEHOLDER}What is in image 2 B1?", [picture(3), picture(4, 56, 84)]),
    (f"{'blue ' * 30}{PLACEHOLDER}", [picture(5, 28, 28)]),
]
PROMPTS: list[str] = TEXTS + [prompt for prompt, _ in IMAGES]
PICTURES: list[Any] = [None] * len(TEXTS) + [images for _, images in IMAGES]


@pytest.fixture(scope="module")
def expected(target_only: TargetOnly) -> list[list[int]]:
    """The target's greedy ids, one request at a time."""
    return target_only(PROMPTS, PICTURES, GREEDY)


def test_alone(tiny_engine: Any, expected: list[list[int]]) -> None:
    for prompt, images, ids in zip(PROMPTS, PICTURES, expected, strict=True):
        answer = tiny_engine.generate(prompt=prompt, image_data=images, sampling_params=GREEDY)
        assert answer["output_ids"] == ids
        summary = summarize(answer["meta_info"])
        assert summary["extend_requests"] == 1
        assert len(ids) <= 1 + round(summary["steps"] * summary["acceptance_length"]) < len(ids) + 4


def test_as_one_batch(bench: Bench, expected: list[list[int]]) -> None:
    order = [5, 0, 4, 3, 6, 1]  # together under CHUNK tokens
    answers = bench.together([PROMPTS[i] for i in order], [PICTURES[i] for i in order], GREEDY)
    assert [a["output_ids"] for a in answers] == [expected[i] for i in order]
    summaries = [summarize(a["meta_info"]) for a in answers]
    assert {s["extend_requests"] for s in summaries} == {6}
    assert len({s["extend_batch"] for s in summaries}) == 1, "they shared one extend batch"


def test_as_a_list_call(tiny_engine: Any, expected: list[list[int]]) -> None:
    """SGLang's own way of sending a batch, radix hits included: everything here has been asked before."""
    order = [*range(len(TEXTS), len(PROMPTS)), *range(len(TEXTS))]  # it wants a request with an image first
    answers = tiny_engine.generate(
        prompt=[PROMPTS[i] for i in order], image_data=[PICTURES[i] for i in order], sampling_params=GREEDY
    )
    assert [a["output_ids"] for a in answers] == [expected[i] for i in order]
    assert sum(a["meta_info"]["cached_tokens"] for a in answers) > 0


def test_streaming_and_logprobs_and_several_choices(tiny_engine: Any, expected: list[list[int]]) -> None:
    prompt = PROMPTS[0]
    *_, last = tiny_engine.generate(prompt=prompt, sampling_params=GREEDY, stream=True)
    plain = tiny_engine.generate(prompt=prompt, sampling_params=GREEDY, return_logprob=True)
    several = tiny_engine.generate(prompt=prompt, sampling_params=GREEDY | {"n": 3})
    for answer in (last, plain, *several):
        summary = summarize(answer["meta_info"])
        assert answer["output_ids"] == expected[0]
        assert summary["first_chain_accepted"] in range(4)
        assert summary["steps"] == summarize(last["meta_info"])["steps"]
        assert isinstance(summary["extend_batch"], int)
    assert len(plain["meta_info"]["output_token_logprobs"]) == len(expected[0])


def test_an_answer_of_one_token_has_no_chain(tiny_engine: Any) -> None:
    answer = tiny_engine.generate(prompt="Repeat: green.", sampling_params=GREEDY | {"max_new_tokens": 1})
    summary = summarize(answer["meta_info"])
    assert (summary["first_chain_accepted"], summary["steps"], summary["extend_requests"]) == (None, 0, 1)
