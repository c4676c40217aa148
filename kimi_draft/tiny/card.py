"""The model card: what was trained, how, and what it does on held-out questions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kimi_draft.tiny import data, tokenizer
from kimi_draft.tiny.draft import Draft
from kimi_draft.tiny.evaluate import FAULTS, Acceptance, acceptance, judge
from kimi_draft.tiny.model import Target
from kimi_draft.tiny.task import KINDS, MIX

HELD_OUT_SEED = 1_000_003  # far from the training seeds
DEPTH = 3  # SGLang's 3 steps, top-1, 4 draft tokens: acceptance length is at most 4


@dataclass(frozen=True)
class Results:
    """Counts on the held-out examples."""

    count: int
    right: dict[str, tuple[int, int]]  # kind -> (answered right, asked)
    accepted: dict[str, dict[str, dict[str, Acceptance]]]  # draft -> fault -> kind -> counters

    @property
    def accuracy(self) -> float:
        """Share of held-out examples answered exactly right, over the shipped mix."""
        return sum(right for right, _ in self.right.values()) / self.count


def measure(target: Target, drafts: Mapping[str, Draft], count: int, seed: int = HELD_OUT_SEED) -> Results:
    """Judge ``count`` held-out examples; acceptance is measured on those that the target answers right."""
    judged = judge(target, data.draw(seed, 0, count))
    right = {}
    for kind in KINDS:
        mine = [good for example, good in judged if example.kind == kind]
        right[kind] = (sum(mine), len(mine))
    good = [example for example, fine in judged if fine]
    accepted = {
        name: {
            fault: acceptance(target, draft, good, fault, DEPTH)
            for fault in (FAULTS if name == "draft" else FAULTS[:1])
        }
        for name, draft in drafts.items()
    }
    return Results(len(judged), right, accepted)


def image_only(kinds: Mapping[str, Acceptance]) -> Acceptance:
    """All image kinds together."""
    return sum((found for kind, found in kinds.items() if "text" not in kind), Acceptance(DEPTH))


def text_only(kinds: Mapping[str, Acceptance]) -> Acceptance:
    """All text-only kinds together."""
    return sum((found for kind, found in kinds.items() if "text" in kind), Acceptance(DEPTH))


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _numbers(found: Acceptance) -> tuple[str, str, str]:
    positions = " / ".join(f"{share:.3f}" for share in found.positions)
    return f"{found.length:.3f}", positions, f"{found.first_chain:.3f}"


def write(
    results: Results,
    plans: Mapping[str, Any],
    seconds: Mapping[str, float],
    models: Mapping[str, Any],
    threads: int,
) -> str:
    """The card as Markdown."""
    lines = [
        "# Tiny Kimi-K2.5 and its EAGLE3-MLA drafts",
        "",
        "Made by `python -m kimi_draft.tiny.train --out kimi_draft/tiny/weights`; this file is its output.",
        "The model reads pictures of coloured shapes on a grid (28 px a cell) and answers in the fixed wording of",
        "`kimi_draft/tiny/task.py`. It knows nothing else: it exists so that the real serving stack runs, and can be",
        "tested, on a machine without a GPU.",
        "",
        f"Vocabulary {tokenizer.vocab_size()}, float32, {threads} threads, torch {torch.__version__}.",
        "",
        _row("", "parameters", "steps", "batch", "seed", "minutes"),
        _row(*["---"] * 6),
    ]
    for name, plan in plans.items():
        size = sum(parameter.numel() for parameter in models[name].parameters())
        minutes = f"{seconds[name] / 60:.1f}" if name in seconds else "kept"
        lines.append(_row(name, f"{size:,}", plan.steps, plan.batch, plan.seed, minutes))
    lines += [
        "",
        f"Evaluation took {seconds['evaluation'] / 60:.1f} minutes. A draft's count leaves out the embedding, which it",
        "shares with the target.",
        "",
        "## Accuracy of the target",
        "",
        f"Greedy answers that are right to the last token, {results.count} held-out examples of the shipped mix "
        f"(seed {HELD_OUT_SEED}): **{results.accuracy:.4f}**.",
        "",
        _row("kind", "share", "right", "asked", "accuracy"),
        _row(*["---"] * 5),
    ]
    for kind, (right, asked) in results.right.items():
        lines.append(_row(kind, f"{MIX[kind]:.2f}", right, asked, f"{right / max(1, asked):.3f}"))
    lines += [
        "",
        "## Acceptance of the drafts",
        "",
        "Chains of 3 draft tokens, greedy, on the examples that the target answers right, by teacher forcing. Length",
        "counts the bonus token (at most 4). Position i: share of rounds in which draft token i was kept. First chain:",
        "draft tokens kept in the first round after prefill (at most 3).",
    ]
    for name, faults in results.accepted.items():
        kinds = faults["none"]
        lines += ["", f"### {name}", "", _row("kind", "length", "position 1 / 2 / 3", "first chain", "requests")]
        lines.append(_row(*["---"] * 5))
        for kind in sorted(kinds):
            lines.append(_row(kind, *_numbers(kinds[kind]), kinds[kind].requests))
        for title, found in (("all images", image_only(kinds)), ("all text-only", text_only(kinds))):
            lines.append(_row(f"**{title}**", *_numbers(found), found.requests))
    lines += [
        "",
        "### What wrong draft inputs would cost (draft, image questions)",
        "",
        "The texts stay the same; only the acceptance drops. The last row is the one whose next token was just",
        "sampled; the prefix are the prompt's other rows.",
        "",
        _row("fault", "length", "position 1 / 2 / 3", "first chain"),
        _row(*["---"] * 4),
    ]
    for fault, kinds in results.accepted["draft"].items():
        lines.append(_row(fault, *_numbers(image_only(kinds))))
    return "\n".join(lines) + "\n"
