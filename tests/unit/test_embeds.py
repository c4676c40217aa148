"""next_token_embeds against a loop over the requests, and the promises about how it runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_draft.embeds import next_token_embeds

HIDDEN = 3


def by_request(embeds: Tensor, starts: list[int], lens: list[int], tails: Tensor) -> Tensor:
    out = torch.zeros_like(embeds)
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for j in range(length):
            out[start + j] = embeds[start + j + 1] if j < length - 1 else tails[b]
    return out


def batch(
    starts: list[int], lens: list[int], rows: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lens) * 1000 + rows)
    embeds = torch.randn(rows, hidden, generator=generator).to(dtype)
    tails = torch.randn(len(lens), hidden, generator=generator).to(dtype)
    return embeds, torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), tails


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Requests in order, with gaps between them and padding behind."""
    starts, lens, row = [], [], 0
    for length, gap in draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=9)):
        row += gap
        starts.append(row)
        lens.append(length)
        row += length
    return starts, lens, row + draw(st.integers(0, 3))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


@given(layouts(), st.sampled_from(DTYPES), st.sampled_from([1, HIDDEN, 4, 8]))
@settings(max_examples=500, deadline=None)
def test_equals_the_loop_over_requests(
    layout: tuple[list[int], list[int], int], dtype: torch.dtype, hidden: int
) -> None:
    starts, lens, rows = layout
    embeds, start, length, tails = batch(starts, lens, rows, dtype, hidden)
    before = [t.clone() for t in (embeds, start, length, tails)]
    found = next_token_embeds(embeds, start, length, tails)
    assert found.dtype == dtype
    assert torch.equal(found, by_request(embeds, starts, lens, tails))
    assert all(torch.equal(a, b) for a, b in zip(before, (embeds, start, length, tails), strict=True)), "input written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "part", [(slice(0, 9), slice(1, 5)), (slice(0, 9), slice(0, 8, 2)), (slice(0, 18, 2), slice(4))]
)
def test_rows_that_are_part_of_a_larger_tensor(part: tuple[slice, slice], dtype: torch.dtype) -> None:
    embeds, start, length, tails = batch([0, 3, 5], [3, 2, 4], 18, dtype, hidden=9)
    embeds, tails = embeds[part], tails[:, :4]
    assert not embeds.is_contiguous()
    expected = by_request(embeds, [0, 3, 5], [3, 2, 4], tails)
    for form in (embeds, embeds.mT.contiguous().mT):
        assert torch.equal(next_token_embeds(form, start, length, tails), expected)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_empty_requests_may_start_anywhere(integer: torch.dtype) -> None:
    starts, lens = [4, 0, 9, 2, 5, 7], [0, 4, 0, 0, 4, 0]
    embeds, start, length, tails = batch(starts, lens, 9)
    tails[[0, 2, 3, 5]] = torch.nan
    found = next_token_embeds(embeds, start.to(integer), length.to(integer), tails)
    assert torch.equal(found, by_request(embeds, starts, lens, tails))


def test_requests_never_read_each_others_rows() -> None:
    embeds, start, length, tails = batch([0, 3, 5], [3, 2, 4], 9)
    alone = next_token_embeds(embeds[3:5], torch.tensor([0]), torch.tensor([2]), tails[1:2])
    embeds[0:3], embeds[5:9] = torch.nan, torch.nan
    assert torch.equal(next_token_embeds(embeds, start, length, tails)[3:5], alone)


def test_an_empty_first_request_changes_nothing() -> None:
    """SGLang 0.5.23's own loop raises here: it slices rotated[0:-1]."""
    embeds, start, length, tails = batch([0, 0], [0, 5], 5)
    expected = next_token_embeds(embeds, start[1:], length[1:], tails[1:])
    assert torch.equal(next_token_embeds(embeds, start, length, tails), expected)


@pytest.mark.parametrize("rows", [0, 4])
def test_no_requests_at_all(rows: int) -> None:
    embeds, start, length, tails = batch([], [], rows)
    assert torch.equal(next_token_embeds(embeds, start, length, tails), torch.zeros(rows, HIDDEN))


@pytest.mark.parametrize("hidden", [HIDDEN, 8])
def test_padding_is_zero_even_when_it_held_nan(hidden: int) -> None:
    embeds, start, length, tails = batch([1], [2], 5, hidden=hidden)
    embeds[[0, 3, 4]] = torch.nan
    assert torch.equal(next_token_embeds(embeds, start, length, tails)[[0, 3, 4]], torch.zeros(3, hidden))


class Calls(TorchDispatchMode):
    """Counts the operations that would launch a kernel, and refuses those that wait for the device."""

    FREE = ("view", "slice", "unsqueeze", "new_empty", "detach")
    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.split("::")[1]
        assert name not in self.WAITS, f"{name} waits for the device"
        self.launches += name not in self.FREE
        return func(*args, **(kwargs or {}))


def launches(requests: int) -> int:
    starts = list(range(0, 4 * requests, 4))
    inputs = batch(starts, [4] * requests, 4 * requests)
    with Calls() as calls:
        next_token_embeds(*inputs)
    return calls.launches


def test_a_constant_number_of_launches_and_no_wait() -> None:
    assert launches(1) == launches(256) <= 9


def test_runs_without_looking_at_values() -> None:
    """On the meta device there are none: what works here can be captured into a CUDA graph."""
    inputs = [t.to("meta") for t in batch([0, 3], [3, 0], 7)]
    assert next_token_embeds(*inputs).shape == (7, HIDDEN)
