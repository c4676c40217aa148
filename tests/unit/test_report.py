"""The demo's figures come from what was measured: integrity, acceptance, percentiles, promises."""

from typing import Any

import numpy as np
import pytest

from cluster.burst import Result, assemble, canonical
from cluster.demo import shortcomings
from cluster.report import acceptance, build, integrity, percentile
from kimi_draft.tiny.task import sample


def group(size: int, *batches: int) -> dict[str, Any]:
    return {"size": size, "batches": [(batch, len(batches)) for batch in batches]}


def test_integrity_counts_groups_of_two_and_more_that_shared_one_batch() -> None:
    assert integrity([group(1, 7)]) is None
    assert integrity([group(2, 7, 7)]) == 1.0
    assert integrity([group(2, 7, 7), group(3, 8, 8, 9)]) == 0.5
    assert integrity([group(3, 8, 8)]) == 0.0, "a member without a report is not a success"


def result(steps: int, rates: list[float], first: int) -> Result:
    example = sample(np.random.default_rng(0), "read")
    kimi = {"verify_steps": steps, "accepted_by_position": rates, "first_chain_accepted": first, "extend_requests": 4}
    return Result(example, "http", {"content": example.answer}, kimi, 0.0, 1.0)


def test_acceptance_is_weighted_by_verify_steps() -> None:
    merged = acceptance([result(1, [0.0, 0.0, 0.0], 0), result(3, [1.0, 1.0, 1.0], 3)])
    assert merged["length"] == pytest.approx(1 + 3 * 0.75)
    assert merged["by_position"] == [0.75] * 3
    assert merged["first_chain"] == 1.5
    assert acceptance([])["length"] is None


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_every_promise_of_the_demo_can_be_broken() -> None:
    results = [result(5, [0.9, 0.8, 0.5], 3) for _ in range(32)]
    good = build(results, [group(2, 1, 1)], (16, 16), 1.0)
    assert shortcomings(good) == []
    broken = build(results[:31], [group(2, 1, 2)], (15, 14), 1.0)
    broken["requests"]["failed"] = 1
    broken["image_answers_correct"] = 0.9
    broken["groups"]["largest_extend_requests"] = 3
    broken["acceptance"]["length"] = 1.0
    assert len(shortcomings(broken)) == 7


def test_streamed_chunks_add_up() -> None:
    def chunk(**delta: Any) -> dict[str, Any]:
        return {"choices": [{"delta": delta}]}

    chunks = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="I see"),
        chunk(content="a"),
        chunk(tool_calls=[{"index": 0, "id": "x", "function": {"name": "report", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1}'}}]),
        {"choices": []},
    ]
    whole = assemble(chunks)
    assert (whole["content"], whole["reasoning_content"]) == ("a", "I see")
    assert whole["tool_calls"][0]["function"] == {"name": "report", "arguments": '{"a": 1}'}
    assert canonical(whole) == canonical(whole | {"role": "assistant", "refusal": None})
