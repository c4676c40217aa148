"""Training of a draft with training-time test: each step also learns from the draft's own guesses, four links deep.

The image rows carry the vision tower's real embeddings, as they do in serving.
"""

from dataclasses import dataclass

import torch
from torch import nn

from kimi_draft.tiny import data
from kimi_draft.tiny.config import draft_config
from kimi_draft.tiny.draft import Cache, Draft, shift
from kimi_draft.tiny.model import Target, image_rows, input_rows, states
from kimi_draft.tiny.train_target import Phase, Report, optimisers


@dataclass(frozen=True)
class DraftPlan:
    """All that decides a draft's weights, given the target."""

    seed: int = 10
    steps: int = 260
    batch: int = 64
    micro: int = 4
    matrix_rate: float = 0.02
    rate: float = 3e-3
    links: int = 4
    decay: float = 0.8  # weight of link i is decay**i
    clip: float = 0.5
    eagle31: bool = False  # fc_norm, norm_output, reduced vocabulary


def hot_ids(seed: int, examples: int = 3000) -> torch.Tensor:
    """Target ids that occur in answers, sorted: the reduced draft vocabulary (a multiple of 16 long)."""
    used = set()
    for example in data.draw(seed, 0, examples):
        row = data.encode(example)
        used.update(row.ids[row.prompt :])
    fill = (token for token in range(10_000) if token not in used)
    while len(used) % 16:
        used.add(next(fill))
    return torch.tensor(sorted(used))


def new_draft(target: Target, plan: DraftPlan) -> Draft:
    """An untrained draft whose head and final norm start as the target's."""
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    hot = hot_ids(plan.seed) if plan.eagle31 else None
    torch.manual_seed(plan.seed)
    draft = Draft(draft_config(None if hot is None else len(hot), plan.eagle31), hot)
    head = target.lm_head.weight
    draft.lm_head.weight.data.copy_(head if hot is None else head[hot])
    draft.norm.weight.data.copy_(target.model.language_model.norm.weight)
    return draft


def train_draft(target: Target, plan: DraftPlan, report: Report) -> Draft:
    """Train a draft for a finished target (which is left as it is)."""
    target.eval()
    draft = new_draft(target, plan)
    muon, adam = optimisers(draft, plan.matrix_rate, plan.rate)
    hump = Phase(plan.steps, {})
    for step in range(plan.steps):
        factor = hump.factor(step)
        muon.rate = plan.matrix_rate * factor
        for group in adam.param_groups:
            group["lr"] = plan.rate * factor
        batch = data.collate(data.draw(plan.seed + 1, step, plan.batch), plan.micro)
        numbers = backward(target, draft, batch, plan)
        nn.utils.clip_grad_norm_(draft.parameters(), plan.clip)
        muon.step()
        adam.step()
        draft.zero_grad(set_to_none=True)
        report(step + 1, numbers)
    return draft.eval()


def backward(target: Target, draft: Draft, step: data.Step, plan: DraftPlan) -> dict[str, float]:
    """Gradients of one step: soft cross-entropy to the target's distribution at every link."""
    rows = None
    if step.pixels is not None and step.grid is not None:
        with torch.no_grad():
            rows = image_rows(target, step.pixels, step.grid)
    total = sum(int(batch.predicts(2).sum()) for batch in step.batches)
    loss_sum, right, count = 0.0, [0] * plan.links, [0] * plan.links
    for batch in step.batches:
        embeds = input_rows(target, batch.ids, None if rows is None or batch.rows is None else rows[batch.rows])
        aux, logits = states(target, embeds)
        if draft.hot is not None:
            logits = logits[..., draft.hot]
        hidden, cache, loss = draft.start(aux), Cache(), torch.zeros(())
        for link in range(plan.links):
            normed, hidden = draft.step(shift(embeds, link + 1), hidden, cache)
            at = batch.predicts(link + 2)
            guess, truth = draft.lm_head(normed[at]), shift(logits, link + 1)[at]
            loss = loss - plan.decay**link * (truth.softmax(-1) * guess.log_softmax(-1)).sum() / total
            right[link] += int((guess.argmax(-1) == truth.argmax(-1)).sum())
            count[link] += int(at.sum())
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
    accuracy = {f"link {i + 1}": r / max(1, n) for i, (r, n) in enumerate(zip(right, count, strict=True))}
    return {"loss": loss_sum, **accuracy}
