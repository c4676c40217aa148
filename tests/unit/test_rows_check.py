"""The second opinion on the draft's rows notices what it should."""

from types import SimpleNamespace

import pytest
import torch

from kimi_draft.rows_check import _Request, check_corrections, compare

VOCAB = 10
TABLE = torch.arange(float(VOCAB))[:, None].repeat(1, 2)
IMAGE = VOCAB + 5


def request(ids: list[int], prefix: int, rows: int, sampled: int = 1) -> _Request:
    return _Request(SimpleNamespace(rid="r", origin_input_ids=ids, output_ids=[]), prefix, rows, sampled, VOCAB)


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


def test_a_cut_image_has_no_expected_tail() -> None:
    part = request([4, IMAGE, IMAGE], prefix=0, rows=2)
    target = torch.tensor([4.0, 51.0])[:, None].repeat(1, 2)
    (report,) = compare([part], torch.tensor([51.0, 99.0])[:, None].repeat(1, 2), target, TABLE)
    assert report["tail_error"] is None and report["unfinished"]


def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIMI_DRAFT_CHECK_ROWS", raising=False)
    assert check_corrections() == []
