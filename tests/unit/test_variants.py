"""The historic wrong rows are wrong in the way that they claim."""

import pytest
import torch

from kimi_draft.embeds import next_token_embeds
from kimi_draft.variants import ENV, Variant, current, rotate_ids, row_function

START, LENS = torch.tensor([0, 3, 5]), torch.tensor([3, 2, 4])
EMBEDS = torch.arange(9.0)[:, None].repeat(1, 2)
TAILS = torch.tensor([[-1.0], [-2.0], [-3.0]]).repeat(1, 2)


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (Variant.CORRECTED, [1, 2, -1, 4, -2, 6, 7, 8, -3]),
        (Variant.LAST_REQUEST_ONLY, [1, 2, 2, 4, 4, 6, 7, 8, -3]),
        (Variant.UNROTATED, [0, 1, -1, 3, -2, 5, 6, 7, -3]),
        (Variant.BOTH, [0, 1, 2, 3, 4, 5, 6, 7, -3]),
    ],
)
def test_rows(variant: Variant, rows: list[float]) -> None:
    embeds = EMBEDS.clone()
    assert row_function(variant)(embeds, START, LENS, TAILS)[:, 0].tolist() == rows
    assert torch.equal(embeds, EMBEDS), "input written"


def test_corrected_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    assert current() is Variant.CORRECTED
    assert row_function(current()) is next_token_embeds


def test_an_unknown_variant_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "corected")
    with pytest.raises(ValueError, match=r"corected.*corrected, upstream"):
        current()


def test_ids_shift_like_rows() -> None:
    ids = torch.arange(9) * 10
    assert rotate_ids(ids, START, LENS, torch.tensor([1, 2, 3], dtype=torch.int32)).tolist() == [
        10, 20, 1, 40, 2, 60, 70, 80, 3,
    ]  # fmt: skip
