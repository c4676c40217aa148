"""Draft trees: built against a simulated draft that knows its own parents, verified against a recursive walk."""

import random

import pytest
import torch

from kimi_draft.cpu.tree import FULL_MASK, QLEN_ONLY, build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu


class Draft:
    """One request's draft as EAGLE makes it: topk beams a step propose topk candidates each; nodes - 1 are selected.

    Candidates are numbered as upstream does (spec_utils.select_top_k_tokens): topk of the root's first, then
    topk * topk of each later step. parent[c] is the candidate that proposed c, None for the root.
    """

    def __init__(self, rng: random.Random, topk: int, steps: int, nodes: int) -> None:
        self.parent: dict[int, int | None] = {c: None for c in range(topk)}
        self.parent_list = list(range(-1, topk))
        beams = list(range(topk))
        for step in range(1, steps):
            base = topk + (step - 1) * topk * topk
            proposed = {base + t * topk + j: beam for t, beam in enumerate(beams) for j in range(topk)}
            self.parent |= proposed
            beams = rng.sample(sorted(proposed), topk)
            if step < steps - 1:  # the last step's beams propose nothing
                self.parent_list += beams
        selected: set[int] = set()
        while len(selected) < nodes - 1:
            open_ = [c for c, p in self.parent.items() if c not in selected and (p is None or p in selected)]
            selected.add(rng.choice(open_))
        self.selected = sorted(selected)

    def path(self, node: int) -> list[int]:
        """Nodes from `node` up to the root."""
        path = [node]
        while path[-1] != 0:
            parent = self.parent[self.selected[path[-1] - 1]]
            path.append(0 if parent is None else self.selected.index(parent) + 1)
        return path

    def children(self, node: int) -> list[int]:
        return [c for c in range(1, len(self.selected) + 1) if self.path(c)[1] == node]


SHAPES = [(1, 3, 4), (1, 1, 2), (2, 3, 6), (4, 3, 8), (3, 5, 12), (4, 1, 4)]


def build(
    drafts: list[Draft], lens: list[int], topk: int, steps: int, nodes: int, mode: int
) -> dict[str, torch.Tensor]:
    batch = len(drafts)
    size = batch * nodes * nodes + (sum(lens) * nodes if mode == FULL_MASK else 0)
    out = {
        "mask": torch.ones(size, dtype=torch.bool),
        "positions": torch.empty(batch * nodes, dtype=torch.long),
        **{k: torch.full((batch, nodes), -1) for k in ("index", "next", "sibling")},
    }
    build_tree_kernel_efficient_cpu(
        torch.tensor([d.parent_list for d in drafts]),
        torch.tensor([d.selected for d in drafts]),
        torch.tensor(lens),
        *out.values(),
        topk,
        steps,
        nodes,
        mode,
    )
    return out


def walk(first: list[int], sibling: list[int], node: int) -> list[int]:
    found, child = [], first[node]
    while child != -1:
        found.append(child)
        child = sibling[child]
    return found


@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
@pytest.mark.parametrize("mode", [QLEN_ONLY, FULL_MASK])
def test_build(topk: int, steps: int, nodes: int, mode: int) -> None:
    rng = random.Random(1)
    for _ in range(20):
        drafts = [Draft(rng, topk, steps, nodes) for _ in range(3)]
        lens = [rng.randrange(1, 9) for _ in drafts]
        out = build(drafts, lens, topk, steps, nodes, mode)
        start = 0
        for b, draft in enumerate(drafts):
            width = nodes if mode == QLEN_ONLY else lens[b] + nodes
            block = out["mask"][start : start + nodes * width].view(nodes, width)
            start += nodes * width
            first, sibling = out["next"][b].tolist(), out["sibling"][b].tolist()
            assert out["index"][b].tolist() == list(range(b * nodes, (b + 1) * nodes))
            assert block[:, : width - nodes].all(), "the prefix columns are the caller's"
            for node in range(nodes):
                path = draft.path(node)
                assert block[node, width - nodes :].nonzero().flatten().tolist() == sorted(path)
                assert int(out["positions"][b * nodes + node]) == lens[b] + len(path) - 1
                assert walk(first, sibling, node) == draft.children(node)


def test_bit_packed_masks_are_refused() -> None:
    draft = Draft(random.Random(0), 1, 3, 4)
    with pytest.raises(ValueError, match="mask mode 2"):
        build([draft], [3], 1, 3, 4, 2)


@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_verify(topk: int, steps: int, nodes: int) -> None:
    """With three tokens in the vocabulary, walks of every length occur."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    lengths = set()
    for _ in range(60):
        drafts = [Draft(rng, topk, steps, nodes) for _ in range(4)]
        out = build(drafts, [5] * 4, topk, steps, nodes, QLEN_ONLY)
        tokens = torch.randint(0, 3, (4, nodes), generator=generator)
        target = torch.randint(0, 3, (4, nodes), generator=generator)
        predicts = torch.full((4 * nodes,), -7, dtype=torch.int32)
        accepted = torch.full((4, steps + 1), -1, dtype=torch.int32)
        counts = torch.empty(4, dtype=torch.int32)
        verify_tree_greedy_cpu(predicts, accepted, counts, tokens, out["index"], out["next"], out["sibling"], target)
        for b, draft in enumerate(drafts):
            node, path = 0, [0]
            while match := [c for c in draft.children(node) if tokens[b, c] == target[b, node]]:
                node = match[0]
                path.append(node)
            flat = [b * nodes + n for n in path]
            assert accepted[b].tolist() == flat + [-1] * (steps + 1 - len(path))
            assert int(counts[b]) == len(path) - 1
            assert predicts[flat].tolist() == target[b, path].tolist()
            lengths.add(len(path))
    assert len(lengths) > 1, "every walk had the same length: the test proves nothing"
