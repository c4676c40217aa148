"""Each stand-in op against a plain loop, including the ones that a chain draft never reaches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_draft.cpu import ops

POOL = torch.arange(6 * 40, dtype=torch.int32).view(6, 40) * 7 + 1


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(pool row, start, end) of some requests, rows distinct, empty spans included."""
    rows = draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]
    starts = [draw(st.integers(0, 20)) for _ in rows]
    return list(rows), starts, [s + draw(st.integers(0, 12)) for s in starts]


@given(spans())
@settings(max_examples=100, deadline=None)
def test_assign_req_to_token_pool(data: tuple[list[int], list[int], list[int]]) -> None:
    rows, starts, ends = data
    slots = torch.arange(1000, 1000 + sum(e - s for s, e in zip(starts, ends, strict=True)))
    expected, taken = POOL.clone(), 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        for position in range(start, end):
            expected[row, position] = slots[taken]
            taken += 1
    found = POOL.clone()
    ops.assign_req_to_token_pool_cpu(torch.tensor(rows), found, torch.tensor(starts), torch.tensor(ends), slots, 40)
    assert torch.equal(found, expected)


@given(spans(), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_assign_extend_cache_locs(data: tuple[list[int], list[int], list[int]], spare: int) -> None:
    rows, starts, ends = data
    expected = [int(POOL[r, p]) for r, s, e in zip(rows, starts, ends, strict=True) for p in range(s, e)]
    out = torch.full((len(expected) + spare,), -5)
    ops.assign_extend_cache_locs_cpu(torch.tensor(rows), POOL, torch.tensor(starts), torch.tensor(ends), out, 40)
    assert out.tolist() == expected + [-5] * spare


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 3), (4, 5)])
def test_assign_draft_cache_locs_contiguous(topk: int, steps: int) -> None:
    rows, lens = [4, 0, 2], [5, 0, 11]
    out = torch.empty(len(rows) * topk * steps, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor(rows, dtype=torch.int32), POOL, torch.tensor(lens), out, 40, topk, steps
    )
    assert out.tolist() == [int(POOL[r, n + i]) for r, n in zip(rows, lens, strict=True) for i in range(topk * steps)]


def test_fill_bonus_tokens() -> None:
    tokens = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]], dtype=torch.int32)
    bonus = torch.empty(3, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [11, 24, 32]


def test_fill_accept_out_cache_loc() -> None:
    accepted = torch.tensor([[0, 2, -1], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    out = torch.zeros(9, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(accepted, torch.arange(100, 112), out)
    assert out.tolist() == [100, 102, 104, 108, 109, 111, 0, 0, 0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_rotate_input_ids(lens: list[int], selected: bool) -> None:
    ids = list(range(100, 100 + sum(lens)))
    starts = [sum(lens[:b]) for b in range(len(lens))]
    new = [-(b + 1) for b in range(len(lens))]
    select = [start + max(length - 2, 0) for start, length in zip(starts, lens, strict=True)]
    expected = list(ids)
    for b, (start, length) in enumerate(zip(starts, lens, strict=True)):
        if length:
            expected[start : start + length - 1] = ids[start + 1 : start + length]
            expected[select[b] if selected else start + length - 1] = new[b]
    found = torch.tensor(ids, dtype=torch.int64)
    ops.rotate_input_ids_cpu(
        found,
        torch.tensor(starts),
        torch.tensor(lens),
        torch.tensor(new)[:, None],
        torch.tensor(select) if selected else None,
    )
    assert found.tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8, unique_by=lambda pair: pair[0]))
@settings(max_examples=100, deadline=None)
def test_copy_all_layer_kv_cache(moves: list[tuple[int, int]]) -> None:
    """Overlapping moves read everything before they write anything; other rows and layers' sizes are respected."""
    buffers = [torch.randn(10, 3), torch.randn(10, 1, 5, dtype=torch.float64), torch.randint(0, 99, (10, 2))]
    expected = [b.clone() for b in buffers]
    before = [b.clone() for b in buffers]
    for target, source in moves:
        for layer, old in zip(expected, before, strict=True):
            layer[target] = old[source]
    ops.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b[0].nbytes for b in buffers]),
        torch.tensor([t for t, _ in moves], dtype=torch.int64),
        torch.tensor([s for _, s in moves], dtype=torch.int64),
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
