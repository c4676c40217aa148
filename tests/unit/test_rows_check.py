"""The second opinion on the draft's rows notices what it should."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_draft.rows_check import _Request, check_corrections, compare

VOCAB = 10
TABLE = torch.arange(float(VOCAB))[:, None].repeat(1, 2)
IMAGE = VOCAB + 5


class Tower:
    """A target model whose picture has rows 50, 51, 52, ..."""

    def get_image_feature(self, items: list[Any]) -> Tensor:
        (item,) = items
        ((first, last),) = item.offsets
        return torch.arange(50.0, 51.0 + last - first)[:, None].repeat(1, 2)


def request(ids: list[int], prefix: int, rows: int, sampled: int = 1, output: Sequence[int] = ()) -> _Request:
    places = [i for i, token in enumerate(ids) if token >= VOCAB]
    images = SimpleNamespace(mm_items=[SimpleNamespace(offsets=[(places[0], places[-1])])]) if places else None
    req = SimpleNamespace(rid="r", origin_input_ids=ids, output_ids=list(output), multimodal_inputs=images)
    return _Request(req, prefix, rows, sampled, VOCAB, Tower())


def test_right_rows_and_each_kind_of_wrong_one() -> None:
    """Two requests: 4 5 [image image] 6, then 7 8."""
    requests = [request([4, 5, IMAGE, IMAGE, 6], 0, 5), request([7, 8], 0, 2, sampled=3)]
    target = torch.tensor([4.0, 5, 51, 52, 6, 7, 8])[:, None].repeat(1, 2)
    right = torch.tensor([5.0, 51, 52, 6, 1, 8, 3])[:, None].repeat(1, 2)
    first, second = compare(requests, right, target, TABLE)
    assert (first["error"], first["tail_error"], first["image_rows"]) == (0.0, 0.0, 2)
    assert (second["error"], second["tail_error"], second["unfinished"]) == (0.0, 0.0, False)
    for row, key in [(0, "error"), (1, "error"), (3, "error"), (4, "tail_error")]:
        wrong = right.clone()
        wrong[row] = torch.nan
        first, second = compare(requests, wrong, target, TABLE)
        assert first[key] == torch.inf and second["error"] == second["tail_error"] == 0.0


def test_a_cut_prompt_expects_the_next_prompt_token() -> None:
    part = request([4, 5, 6, 7], prefix=1, rows=2)
    (report,) = compare([part], torch.tensor([6.0, 7.0])[:, None].repeat(1, 2), None, TABLE)
    assert report["unfinished"] and report["error"] == report["tail_error"] == 0.0


@pytest.mark.parametrize(("rows", "tail"), [(1, 50.0), (2, 51.0)])
def test_a_cut_at_an_image_expects_the_tower_s_next_row(rows: int, tail: float) -> None:
    part = request([4, IMAGE, IMAGE], prefix=0, rows=rows)
    seen = torch.tensor([50.0, tail])[-rows:, None].repeat(1, 2)
    target = torch.tensor([4.0, 50.0])[:rows, None].repeat(1, 2)
    (report,) = compare([part], seen, target, TABLE)
    assert report["tail_error"] == report["error"] == 0.0 and report["unfinished"] and report["image_tail"]
    (report,) = compare([part], seen + torch.tensor([[0.0]] * (rows - 1) + [[1.0]]), target, TABLE)
    assert (report["error"], report["tail_error"]) == (0.0, 1.0)


def test_a_resumed_request_expects_its_own_output() -> None:
    part = request([4, 5], prefix=0, rows=3, output=[6, 7, 8])
    (report,) = compare([part], torch.tensor([5.0, 6.0, 7.0])[:, None].repeat(1, 2), None, TABLE)
    assert report["unfinished"] and report["resumed"] and report["error"] == report["tail_error"] == 0.0


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIMI_DRAFT_CHECK_ROWS", raising=False)
    assert check_corrections() == []
