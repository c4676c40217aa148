"""Held-out accuracy of the target, and acceptance of a draft, both by teacher forcing.

Greedy decoding gives exactly the reference answer if and only if every argmax along the reference is right, so one
forward pass judges a whole batch. For free-choice questions the reference is the answer in the order that the model
itself prefers.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kimi_draft.tiny import data, tokenizer
from kimi_draft.tiny.draft import Cache, Draft, shift
from kimi_draft.tiny.model import Target, hidden_rows, image_rows, input_rows, states
from kimi_draft.tiny.task import Example

CHUNK = 100
# Faults of a draft's input embeddings; kimi_draft.embeds makes the right ones.
FAULTS = ("none", "stale last row", "zero last row", "unrotated prefix", "unrotated and stale", "pad at images")


@torch.no_grad()
def judge(target: Target, examples: Sequence[Example], own_choice: bool = True) -> list[tuple[Example, bool]]:
    """(example, answered exactly right by greedy decoding?), free-choice answers replaced by the model's own choice.

    Without ``own_choice`` the drawn answers stay and their first token is given, not judged: as if it had been sampled.
    """
    judged = []
    for start in range(0, len(examples), CHUNK):
        part = examples[start : start + CHUNK]
        chosen = _own_choice(target, part) if own_choice else part
        batch, embeds = _embed(target, chosen)
        best = target.lm_head(hidden_rows(target, embeds)).argmax(-1)
        asked = batch.predicts()
        if not own_choice:
            asked[torch.arange(len(asked)), batch.prompt - 1] = False
        right = ((best == batch.ids.roll(-1, 1)) | ~asked).all(1)
        judged += list(zip(batch.examples, right.tolist(), strict=True))
    return judged


def by_kind(judged: Sequence[tuple[Example, bool]]) -> dict[str, tuple[int, int]]:
    """(right, asked) of every kind that was asked."""
    found: dict[str, tuple[int, int]] = {}
    for example, good in judged:
        right, asked = found.get(example.kind, (0, 0))
        found[example.kind] = (right + good, asked + 1)
    return dict(sorted(found.items()))


def _embed(target: Target, examples: Sequence[Example]) -> tuple[data.Batch, torch.Tensor]:
    step = data.collate(examples)
    rows = None if step.pixels is None or step.grid is None else image_rows(target, step.pixels, step.grid)
    batch = step.batches[0]
    return batch, input_rows(target, batch.ids, rows if batch.rows is None or rows is None else rows[batch.rows])


def _own_choice(target: Target, examples: Sequence[Example]) -> list[Example]:
    free = [example for example in examples if len(example.answers) > 1]
    if not free:
        return list(examples)
    batch, embeds = _embed(target, free)
    best = target.lm_head(hidden_rows(target, embeds)).argmax(-1)
    own: dict[int, Example] = {}
    for k, example in enumerate(batch.examples):
        word = tokenizer.build().decode([int(best[k, batch.prompt[k] - 1 + _reasoning_length(example)])])
        answer = next((a for a in example.answers if a.startswith(word)), example.answer)
        own[id(example)] = replace(example, answer=answer)
    return [own.get(id(example), example) for example in examples]


def _reasoning_length(example: Example) -> int:
    """Tokens before the answer proper, ``</think>`` included."""
    if example.reasoning is None:
        return 0
    return len(tokenizer.build().encode(f"{example.reasoning}</think>").ids)


@dataclass
class Acceptance:
    """Counters of speculative rounds; ``depth`` drafts a round."""

    depth: int
    requests: int = 0
    rounds: int = 0
    tokens: int = 0
    first: int = 0  # accepted in the first round after prefill
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tried, self.kept = self.tried or [0] * self.depth, self.kept or [0] * self.depth

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.depth,
            self.requests + other.requests,
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            self.first + other.first,
            [a + b for a, b in zip(self.tried, other.tried, strict=True)],
            [a + b for a, b in zip(self.kept, other.kept, strict=True)],
        )

    @property
    def length(self) -> float:
        """Tokens per round of verification, the bonus token included (1 to depth + 1)."""
        return self.tokens / max(1, self.rounds)

    @property
    def first_chain(self) -> float:
        """Draft tokens accepted in the first round after prefill: it is seeded by the prefill's last row."""
        return self.first / max(1, self.requests)

    @property
    def positions(self) -> list[float]:
        """Share of rounds in which draft token i was kept, of the rounds where the answer reached that far."""
        return [kept / max(1, tried) for kept, tried in zip(self.kept, self.tried, strict=True)]


@torch.no_grad()
def acceptance(
    target: Target, draft: Draft, examples: Sequence[Example], fault: str = "none", depth: int = 3
) -> dict[str, Acceptance]:
    """Rounds of chain speculation along the reference answers, by kind, for examples that `judge` passed."""
    found: dict[str, Acceptance] = defaultdict(lambda: Acceptance(depth))
    for start in range(0, len(examples), CHUNK):
        batch, embeds = _embed(target, examples[start : start + CHUNK])
        aux, _ = states(target, embeds)
        hidden, cache, right = draft.start(aux), Cache(), []
        for link in range(depth):
            seen = _first_rows(target, batch, embeds, fault) if link == 0 else shift(embeds, link + 1)
            normed, hidden = draft.step(seen, hidden, cache)
            guess = draft.to_target_ids(draft.lm_head(normed).argmax(-1))
            right.append(guess == shift(batch.ids, link + 2))
        table = torch.stack(right, -1).tolist()
        for k, example in enumerate(batch.examples):
            found[example.kind] += _rounds(table[k], int(batch.prompt[k]), int(batch.length[k]), depth)
    return dict(found)


def _first_rows(target: Target, batch: data.Batch, embeds: torch.Tensor, fault: str) -> torch.Tensor:
    """Embeddings that the draft's extend sees after prefill, with one of ``FAULTS`` injected."""
    seen = shift(embeds)
    every, last = torch.arange(len(batch.ids)), batch.prompt - 1
    if fault == "pad at images":
        return shift(input_rows(target, batch.ids, None))
    if fault in ("stale last row", "unrotated and stale"):
        seen[every, last] = embeds[every, last]
    if fault == "zero last row":
        seen[every, last] = 0
    if fault in ("unrotated prefix", "unrotated and stale"):
        prefix = torch.arange(batch.ids.shape[1])[None] < last[:, None]
        seen = torch.where(prefix[..., None], embeds, seen)
    return seen


def _rounds(right: list[list[bool]], prompt: int, length: int, depth: int) -> Acceptance:
    """Walk one answer: token ``prompt`` comes from prefill; each round keeps a run of right guesses and a bonus."""
    count = Acceptance(depth, requests=1)
    at = prompt - 1  # the draft's row: it has seen token at + 1 and guesses at + 2, ...
    while at + 2 < length:
        left = length - (at + 2)
        kept = 0
        while kept < min(depth, left) and right[at][kept]:
            kept += 1
        for i in range(min(depth, left)):
            count.tried[i] += 1
            count.kept[i] += kept > i
        if count.rounds == 0:
            count.first = kept
        count.rounds += 1
        count.tokens += min(kept + 1, left)
        at += kept + 1
    return count
