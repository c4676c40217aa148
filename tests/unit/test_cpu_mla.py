"""Padded MLA attention against one query at a time, written out."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_draft.cpu import mla
from kimi_draft.cpu.mla import attend, rectangle, split

HEADS, DIM, VALUE = 3, 6, 4
SCALE = 0.37


def one_by_one(query: Tensor, cache: Tensor, visible: list[list[int]]) -> Tensor:
    """visible[n]: the cache slots that query row n may read."""
    rows = []
    for q, slots in zip(query, visible, strict=True):
        kv = cache[slots].float()
        rows.append((q.float() @ kv.T * SCALE).softmax(-1) @ kv[:, :VALUE])
    return torch.stack(rows)


def data(requests: int, rows: int, longest: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(query, cache, table): every position of every request has a slot of its own, in no order."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(requests * longest, generator=generator).view(requests, longest) + 1
    cache = torch.randn(requests * longest + 1, DIM, generator=generator)
    cache[0] = 1e4  # slot 0 is padding: reading it would show
    return torch.randn(rows, HEADS, DIM, generator=generator), cache, table.int()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7))
@settings(max_examples=100, deadline=None)
def test_extend_with_prefix(shapes: list[tuple[int, int]]) -> None:
    q_lens, prefix = torch.tensor(shapes).unbind(1)
    kv_lens = q_lens + prefix
    query, cache, table = data(len(shapes), int(q_lens.sum()), int(kv_lens.max()) + 2)
    visible = [table[r, : p + j + 1].tolist() for r, (n, p) in enumerate(shapes) for j in range(n)]
    start = q_lens.cumsum(0) - q_lens
    groups = split(q_lens.tolist(), kv_lens.tolist())
    assert sorted(chain.from_iterable(groups)) == list(range(len(shapes)))
    for plan in (
        [rectangle(start, q_lens, table, kv_lens)],
        [rectangle(start[g], q_lens[g], table[g], kv_lens[g]) for g in groups],
    ):
        found = attend(query, cache, plan, SCALE, VALUE)
        torch.testing.assert_close(found, one_by_one(query, cache, visible), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_verify_with_a_tree(nodes: int) -> None:
    lens = torch.tensor([5, 0, 11])
    query, cache, table = data(3, 3 * nodes, 20)
    tree = torch.rand(3, nodes, nodes, generator=torch.Generator().manual_seed(1)) < 0.4
    tree |= torch.eye(nodes, dtype=torch.bool)
    visible = [
        table[r, : lens[r]].tolist() + [int(table[r, lens[r] + j]) for j in range(nodes) if tree[r, i, j]]
        for r in range(3)
        for i in range(nodes)
    ]
    plan = [rectangle(torch.arange(3) * nodes, torch.full((3,), nodes), table, lens + nodes, tree)]
    found = attend(query, cache, plan, SCALE, VALUE)
    torch.testing.assert_close(found, one_by_one(query, cache, visible), atol=1e-5, rtol=1e-5)


def test_a_forgotten_key_shows() -> None:
    """Negative control: one key less, and the comparison above fails by orders of magnitude more than its tolerance."""
    query, cache, table = data(2, 2, 10)
    lens = torch.tensor([6, 9])
    right = attend(query, cache, [rectangle(torch.arange(2), torch.ones_like(lens), table, lens)], SCALE, VALUE)
    wrong = attend(query, cache, [rectangle(torch.arange(2), torch.ones_like(lens), table, lens - 1)], SCALE, VALUE)
    assert float((right - wrong).abs().max()) > 1e-2


def test_half_precision_is_computed_in_float32() -> None:
    query, cache, table = data(1, 1, 8)
    plan = [rectangle(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long), table, torch.tensor([8]))]
    found = attend(query.bfloat16(), cache.bfloat16(), plan, SCALE, VALUE)
    expected = one_by_one(query.bfloat16(), cache.bfloat16(), [table[0].tolist()]).bfloat16()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_split_bounds_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "SMALL_RECTANGLE", 0)
    q_lens, kv_lens = [1, 1, 300, 0, 280, 2], [900, 20, 300, 50, 600, 30]
    groups = split(q_lens, kv_lens)
    assert sorted(chain.from_iterable(groups)) == [0, 1, 2, 4, 5], "requests without a query are left out"
    for group in groups:
        needed = sum(q_lens[r] * kv_lens[r] for r in group)
        area = max(q_lens[r] for r in group) * max(kv_lens[r] for r in group) * len(group)
        assert area <= mla.MAX_PADDING * needed
    assert len(split([1] * 32, [100] * 32)) == 1


def test_rows_of_no_rectangle_are_zero() -> None:
    query, cache, table = data(1, 3, 4)
    plan = [rectangle(torch.tensor([1]), torch.tensor([1]), table, torch.tensor([4]))]
    assert not attend(query, cache, plan, SCALE, VALUE)[[0, 2]].any()
