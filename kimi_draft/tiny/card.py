"""The model card: what was trained, how, and what it does on held-out questions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_draft.tiny import data, tokenizer
from kimi_draft.tiny.draft import Draft
from kimi_draft.tiny.evaluate import FAULTS, Acceptance, acceptance, by_kind, judge
from kimi_draft.tiny.model import Target
from kimi_draft.tiny.task import MIX

HELD_OUT_SEED = 1_000_003  # far from the training seeds
DEPTH = 3  # SGLang's 3 steps, top-1, 4 draft tokens: acceptance length is at most 4

INTRODUCTION = """\
# Tiny Kimi-K2.5 and its EAGLE3-MLA drafts

Made by `python -m kimi_draft.tiny.train --out kimi_draft/tiny/weights`; this file is its output. The model reads
pictures of coloured shapes on a grid (28 px a cell) and answers in the fixed wording of `kimi_draft/tiny/task.py`.
It knows nothing else: it exists so that the real serving stack runs, and can be tested, on a machine without a GPU.
"""
ACCEPTANCE = """
## Acceptance of the drafts

Chains of 3 draft tokens, greedy, on the examples that the target answers right, by teacher forcing. Length counts the
bonus token (at most 4). Position i: share of rounds in which draft token i was kept. First chain: draft tokens kept in
the first round after prefill (at most 3).
"""
FAULT_NOTE = """
### What wrong draft inputs would cost

The texts stay the same; only the acceptance drops. The last row is the one whose next token was just sampled, the
prefix are the prompt's other rows. All image questions, with `draft`:
"""
SAMPLED_NOTE = """
The same on free-choice questions whose order is drawn at random, as sampling does: the draft cannot know the first
token from the hidden state. The rest of the answer is right in {right} of {asked}.
"""
LEFT_OUT = """
## What is left out

- Are two cells the same? The verdict stayed at chance after 250 steps of little else. The comparison that is shipped is
  `both`: two cells against a named colour.
- Counting without listing the cells. `count` lists them with a running count, in the answer or in the reasoning.
- Pictures that are not whole cells of 28 px, 2 to 4 a side: they are accepted, but the model cannot read them.
"""


@dataclass(frozen=True)
class Results:
    """Counts on the held-out examples; ``sampled`` is of free-choice questions whose order is drawn at random."""

    count: int
    right: dict[str, tuple[int, int]]  # kind -> (answered right, asked)
    accepted: dict[str, dict[str, dict[str, Acceptance]]]  # draft -> fault -> kind -> counters
    sampled: dict[str, Acceptance]  # fault -> counters
    sampled_right: tuple[int, int]

    @property
    def accuracy(self) -> float:
        """Share of held-out examples answered exactly right, over the shipped mix."""
        return sum(right for right, _ in self.right.values()) / self.count


def measure(target: Target, drafts: Mapping[str, Draft], count: int, seed: int = HELD_OUT_SEED) -> Results:
    """Judge ``count`` held-out examples; acceptance is measured on those that the target answers right."""
    judged = judge(target, data.draw(seed, 0, count))
    good = [example for example, fine in judged if fine]
    accepted = {
        name: {fault: acceptance(target, draft, good, fault, DEPTH) for fault in faults}
        for (name, draft), faults in zip(drafts.items(), (FAULTS, FAULTS[:1]), strict=True)
    }
    free = judge(target, data.draw(seed + 1, 0, count // 5, {"read_any": 1.0}), own_choice=False)
    fine_free = [example for example, fine in free if fine]
    sampled = {fault: image_only(acceptance(target, drafts["draft"], fine_free, fault, DEPTH)) for fault in FAULTS}
    return Results(len(judged), by_kind(judged), accepted, sampled, (len(fine_free), len(free)))


def image_only(kinds: Mapping[str, Acceptance]) -> Acceptance:
    """All image kinds together."""
    return sum((found for kind, found in kinds.items() if "text" not in kind), Acceptance(DEPTH))


def text_only(kinds: Mapping[str, Acceptance]) -> Acceptance:
    """All text-only kinds together."""
    return sum((found for kind, found in kinds.items() if "text" in kind), Acceptance(DEPTH))


def write(
    results: Results, plans: Mapping[str, Any], seconds: Mapping[str, float], models: Mapping[str, Any], threads: int
) -> str:
    """The card as Markdown."""
    plural, minutes = "s" if threads > 1 else "", sum(seconds.values()) / 60
    right, asked = results.sampled_right
    parts = [
        INTRODUCTION,
        f"Vocabulary {tokenizer.vocab_size()}, float32, {threads} thread{plural}, torch {torch.__version__}.\n",
        _table(("", "parameters", "steps", "batch", "seed", "minutes"), _model_rows(plans, seconds, models)),
        "\nA draft's count leaves out the embedding, which it shares with the target. "
        f"All took {minutes:.1f} minutes; {seconds['evaluation'] / 60:.1f} went into this evaluation.",
        "\n## Accuracy of the target\n",
        f"Greedy answers, right to the last token, on {results.count} held-out examples of the shipped mix "
        f"(seed {HELD_OUT_SEED}): **{results.accuracy:.4f}**.\n",
        _table(("kind", "share", "right", "asked", "accuracy"), _accuracy_rows(results)),
        ACCEPTANCE,
        *(_draft_section(name, faults["none"]) for name, faults in results.accepted.items()),
        FAULT_NOTE,
        _fault_table({fault: image_only(kinds) for fault, kinds in results.accepted["draft"].items()}),
        SAMPLED_NOTE.format(right=right, asked=asked),
        _fault_table(results.sampled),
        LEFT_OUT,
    ]
    return "\n".join(parts)


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    table: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in table)


def _model_rows(
    plans: Mapping[str, Any], seconds: Mapping[str, float], models: Mapping[str, Any]
) -> Iterable[tuple[object, ...]]:
    for name, plan in plans.items():
        size = sum(parameter.numel() for parameter in models[name].parameters())
        minutes = f"{seconds[name] / 60:.1f}" if name in seconds else "kept"
        yield name, f"{size:,}", plan.steps, plan.batch, plan.seed, minutes


def _accuracy_rows(results: Results) -> Iterable[tuple[object, ...]]:
    for kind, (right, asked) in results.right.items():
        yield kind, f"{MIX[kind]:.2f}", right, asked, f"{right / asked:.3f}"


def _numbers(found: Acceptance) -> tuple[str, str, str]:
    positions = " / ".join(f"{share:.3f}" for share in found.positions)
    return f"{found.length:.3f}", positions, f"{found.first_chain:.3f}"


def _draft_section(name: str, kinds: Mapping[str, Acceptance]) -> str:
    together = {"**all images**": image_only(kinds), "**all text-only**": text_only(kinds)}
    rows = [(kind, *_numbers(found), found.requests) for kind, found in [*sorted(kinds.items()), *together.items()]]
    return f"### {name}\n\n" + _table(("kind", "length", "position 1 / 2 / 3", "first chain", "requests"), rows) + "\n"


def _fault_table(faults: Mapping[str, Acceptance]) -> str:
    rows = [(fault, *_numbers(found)) for fault, found in faults.items()]
    return _table(("fault", "length", "position 1 / 2 / 3", "first chain"), rows)
