"""The rows that the real draft receives, for the corrected engine, upstream's and the historic ones."""

from typing import Any

import pytest

from kimi_draft.stats import summarize
from tests.engine.conftest import CHUNK, GREEDY, PLACEHOLDER, Bench, picture

SHORT = GREEDY | {"max_new_tokens": 12}
QUESTIONS = ["What is in A1?", "Read the cells in any order.", "What is in B2? ", "x"]


def ask(bench: Bench, first_seed: int) -> list[dict[str, Any]]:
    """Four requests with new pictures and one without, in one extend batch."""
    prompts = [PLACEHOLDER + question for question in QUESTIONS] + ["Repeat: red blue."]
    images = [[picture(first_seed + i, 84, 56 + 28 * (i % 2))] for i in range(4)] + [None]
    return bench.together(prompts, images, SHORT)


@pytest.mark.parametrize(
    ("variant", "wrong_rows", "wrong_tails"),
    [
        ("corrected", False, 0),
        ("upstream", False, 0),
        ("last_request_only", False, 4),
        ("unrotated", True, 0),
        ("both", True, 4),
    ],
)
def test_rows_of_a_batch_of_images(bench: Bench, variant: str, wrong_rows: bool, wrong_tails: int) -> None:
    """The text is the same in all of them: only the rows, and with them the guesses, differ."""
    with bench.switched(variant=variant), bench.records("rows") as extends:
        answers = ask(bench, first_seed=100)
    (extend,) = extends
    rows = extend["requests"]
    assert sorted(r["image_rows"] > 0 for r in rows) == [False] + [True] * 4
    assert all((r["error"] > 1e-3) == wrong_rows for r in rows), rows
    assert sum(r["tail_error"] > 1e-3 for r in rows) == wrong_tails, rows
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in ask(bench, first_seed=100)]


def test_rows_of_a_text_batch_and_of_a_radix_hit(bench: Bench) -> None:
    with bench.records("rows") as extends:
        bench.together(["Repeat: red.", "Repeat: red blue.", "What?"], [None] * 3, SHORT)
        picture_prompt = [f"{PLACEHOLDER}What is in A2?", f"{PLACEHOLDER}What is in B3?"]
        for prompt in picture_prompt:  # the second finds the picture in the cache
            bench.together([prompt], [[picture(7)]], SHORT)
    assert [len(e["requests"]) for e in extends] == [3, 1, 1]
    assert extends[2]["requests"][0]["prefix"] > 9
    assert all(r["error"] < 1e-6 and r["tail_error"] < 1e-6 for e in extends for r in e["requests"])


def test_rows_of_a_cut_prompt(bench: Bench) -> None:
    """An unfinished chunk's last row takes the next prompt token, not the one that happens to be sampled."""
    with bench.records("rows") as extends:
        bench.together(["green " * (2 * CHUNK + 9)], [None], SHORT)
    rows = [r for e in extends for r in e["requests"]]
    assert [r["unfinished"] for r in rows] == [True] * (len(rows) - 1) + [False] and len(rows) >= 3
    assert all(r["error"] < 1e-6 and r["tail_error"] < 1e-6 for r in rows)


def test_a_wrong_draft_guesses_worse(bench: Bench) -> None:
    """What the correction is for: drafts accepted in the first chain, over the same batches."""
    accepted = {}
    for variant in ("corrected", "both"):
        with bench.switched(variant=variant):
            answers = [a for seed in range(200, 240, 4) for a in ask(bench, seed)[:3]]
        accepted[variant] = sum(summarize(a["meta_info"])["first_chain_accepted"] or 0 for a in answers)
    assert accepted["both"] < accepted["corrected"], accepted
