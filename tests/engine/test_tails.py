"""What follows an unfinished prompt, on the real engine: cuts inside images, before them, and in resumed outputs."""

import asyncio
import re
from typing import Any

import pytest
from PIL import Image
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from tests.engine.conftest import CHUNK, GREEDY, PLACEHOLDER, Bench, picture

BRIEF = GREEDY | {"max_new_tokens": 4}
ROWS = 100  # of a picture of 280x280
WRONG = 1e-3
VARIANTS = [("corrected", False), ("upstream_tails", True), ("upstream", True)]


def prompt_with_image_at(bench: Bench, position: int) -> str:
    """A prompt whose picture begins at this row."""
    tokenizer = bench.engine.tokenizer_manager.tokenizer
    pad = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    for words in range(position):
        prompt = "green " * words + PLACEHOLDER + "What is in B2?"
        found = tokenizer.encode(prompt).index(pad)
        if found >= position:
            break
    assert found == position, (found, position)
    return prompt


def large(seed: int) -> Image.Image:
    return picture(seed, 280, 280)


def rows(extends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for e in extends for r in e["requests"]]


@pytest.mark.parametrize(("variant", "wrong"), VARIANTS)
def test_a_cut_at_an_image(bench: Bench, variant: str, wrong: bool) -> None:
    """Inside the picture, behind its first row, just before it, and just behind it, where all are right."""
    for begins in (CHUNK - 60, CHUNK - 1, CHUNK, CHUNK - ROWS):
        with bench.switched(variant=variant), bench.records("rows") as extends:
            bench.together([prompt_with_image_at(bench, begins)], [[large(begins)]], BRIEF)
        cut, rest = rows(extends)
        assert (cut["rows"], cut["unfinished"], cut["image_tail"]) == (CHUNK, True, begins + ROWS > CHUNK)
        assert (cut["tail_error"] > WRONG) == (wrong and cut["image_tail"]), (begins, cut)
        assert max(cut["error"], rest["error"], rest["tail_error"]) < WRONG


@pytest.mark.parametrize(("variant", "wrong"), VARIANTS)
def test_a_later_request_finds_good_keys_in_the_cache(bench: Bench, variant: str, wrong: bool) -> None:
    """The draft's last row sees the key of every row before it, those that the radix tree kept included."""
    filler, prompt, image = "green " * (CHUNK - 60), prompt_with_image_at(bench, 20), [large(3)]
    with bench.switched(), bench.records("drafts") as alone:
        bench.together([prompt], [image], BRIEF)
    with bench.switched(variant=variant):
        with bench.records("rows") as extends:
            bench.together([filler, prompt], [None, image], BRIEF)
        with bench.records("rows") as again, bench.records("drafts") as cached:
            bench.together([prompt], [image], BRIEF)
    assert [r["image_tail"] for r in rows(extends)] == [False, True, False], "not cut inside the picture"
    (hit,) = rows(again)
    assert hit["prefix"] > 20 + ROWS and hit["image_rows"] == 0
    difference = max(abs(a - b) for a, b in zip(alone[0][0]["hidden"], cached[0][0]["hidden"], strict=True))
    assert (difference > WRONG) == wrong, difference


async def retract_and_resume(engine: Any, prompts: list[str], params: dict[str, Any], after: int) -> list[list[int]]:
    """Answers of requests that lose their keys when all of them have `after` tokens."""
    manager = engine.tokenizer_manager
    lengths = [0] * len(prompts)
    ready = asyncio.Event()

    async def ask(i: int) -> list[int]:
        stream = await engine.async_generate(prompt=prompts[i], sampling_params=params, stream=True)
        async for chunk in stream:
            lengths[i] = chunk["meta_info"]["completion_tokens"]
            if min(lengths) >= after:
                ready.set()
        ids: list[int] = chunk["output_ids"]
        return ids

    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(ask(i)) for i in range(len(prompts))]
        await ready.wait()
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        await manager.continue_generation(ContinueGenerationReqInput())
    return [answer.result() for answer in answers]


@pytest.mark.parametrize(("variant", "wrong"), VARIANTS)
def test_a_resumed_request_cut_in_its_output(bench: Bench, variant: str, wrong: bool) -> None:
    prompts = [f"What is in {c}1?" for c in "ABCDEFGH"]
    # So hot that a token drawn again is hardly ever the same; their keys then need more than one chunk.
    params = {"temperature": 100.0, "max_new_tokens": 90, "ignore_eos": True}
    with bench.switched(variant=variant), bench.records("rows") as extends:
        answers = bench.engine.loop.run_until_complete(retract_and_resume(bench.engine, prompts, params, after=40))
    assert [len(ids) for ids in answers] == [90] * len(prompts)
    resumed = [r for r in rows(extends) if r["resumed"]]
    cut = [r for r in resumed if r["unfinished"]]
    assert cut and len({r["rid"] for r in resumed}) == len(prompts)
    assert all((r["tail_error"] > WRONG) == (wrong and r in cut) and r["error"] < WRONG for r in resumed), resumed


@pytest.mark.parametrize(("variant", "wrong"), VARIANTS)
def test_an_unfinished_prompt_that_the_batch_does_not_name(bench: Bench, variant: str, wrong: bool) -> None:
    """SGLang's scheduler cuts one request a batch and names it. Nothing here may depend on either."""
    with bench.switched(variant=variant, chunked="unnamed"), bench.records("rows") as extends:
        bench.together(["green blue red " * CHUNK], [None], BRIEF)
    *cuts, end = rows(extends)
    assert len(cuts) == 3 and all(r["unfinished"] and (r["tail_error"] > WRONG) == wrong for r in cuts), cuts
    assert not end["unfinished"] and end["tail_error"] < WRONG


def tried(bench: Bench, trial: str, variant: str, pictures: int) -> dict[str, Any]:
    """What came of one batch with that many pictures."""
    prompts = [f"{PLACEHOLDER}What is in {c}1?" for c in "ABCDEFGH"[:pictures]]
    with (
        bench.switched(variant=variant, trial=trial),
        bench.records("rows") as true,
        bench.records("trials") as records,
    ):
        bench.together(prompts, [[picture(300 + i, 56, 56)] for i in range(pictures)], BRIEF)
    assert all(r["error"] < WRONG and r["tail_error"] < WRONG for r in rows(true))
    (record,) = records
    assert record["requests"] == pictures, "not one batch"
    return record


@pytest.mark.parametrize(
    ("trial", "upstreams"),
    [
        ("empty_first", "The size of tensor a .* must match the size of tensor b"),
        ("padded_target", "Sizes of tensors must match"),
        ("images_unseen", None),  # last rows stay uninitialised
    ],
)
def test_batches_that_no_scheduler_makes_today(bench: Bench, trial: str, upstreams: str | None) -> None:
    ours, theirs = (tried(bench, trial, variant, 2) for variant in ("corrected", "upstream"))
    assert ours["raised"] is None and ours["error"] < WRONG, ours
    if upstreams is None:
        assert theirs["error"] > WRONG, theirs
    else:
        assert re.match(upstreams, theirs["raised"]), theirs


def test_the_work_ahead_of_the_draft_does_not_grow_with_the_batch(bench: Bench) -> None:
    """Operations that make the rows; on a GPU each is a launch."""
    few, many = (
        {variant: tried(bench, "unchanged", variant, n)["launches"] for variant in ("corrected", "upstream")}
        for n in (2, 8)
    )
    assert many["corrected"] == few["corrected"], (few, many)
    assert many["upstream"] > few["upstream"] + 6 * 2, (few, many)
