"""Training of the target: cross-entropy on the answers, plus an early auxiliary loss that teaches the eye to see.

Data depend on (seed, step) and nothing on the clock, so a run with the same seed and thread count repeats.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kimi_draft.tiny import data
from kimi_draft.tiny.config import HIDDEN
from kimi_draft.tiny.evaluate import by_kind, judge
from kimi_draft.tiny.model import Target, build_target, hidden_rows, image_rows, input_rows
from kimi_draft.tiny.muon import Muon
from kimi_draft.tiny.task import MIX

Report = Callable[[int, dict[str, float]], None]

# What the rest builds on: looking one cell up, and copying from a text.
LOOK = {"read": 0.2, "name": 0.2, "two_images": 0.2, "tool": 0.1, "text_repeat": 0.2, "text_last": 0.1}
# What needs more than one look-up; the rest only so that it is not forgotten.
COMBINE = {
    "both": 0.15,
    "think_both": 0.07,
    "count": 0.13,
    "think_count": 0.13,
    "text_repeat": 0.12,
    "think_text_repeat": 0.05,
    "text_last": 0.07,
    "think_text_last": 0.03,
    "read": 0.04,
    "read_any": 0.03,
    "think_read": 0.02,
    "think_read_any": 0.03,
    "think_name": 0.03,
    "think_tool": 0.03,
    "tool": 0.02,
    "two_images": 0.05,
}


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own mix of kinds and its own learning-rate hump."""

    steps: int
    shares: dict[str, float]
    peak: float = 1.0
    warm_up: int = 20

    def factor(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, flat for 40 % of the phase, then linear down to 2 %."""
        decay = max(0.0, step / self.steps - 0.4) / 0.6
        return self.peak * min(1.0, (step + 1) / self.warm_up) * (1 - 0.98 * decay)


# Compositions are not learned before the look-ups are settled, and those settle only at a low rate: hence three humps
# and not one. A single hump of 2200 steps still had counting and repeating near zero after 1750 of them.
PHASES = (
    Phase(600, MIX, warm_up=40),
    Phase(550, COMBINE),
    Phase(650, MIX, peak=0.7),
)


@dataclass(frozen=True)
class TargetPlan:
    """All that decides the target's weights, besides the code."""

    seed: int = 0
    phases: tuple[Phase, ...] = PHASES
    batch: int = 64
    micro: int = 4
    matrix_rate: float = 0.02  # Muon
    rate: float = 3e-3  # AdamW: embeddings, head, router, norms, biases
    look_steps: int = 80  # the very first steps only ask what LOOK asks
    aux_weight: float = 0.5
    aux_steps: int = 350  # fades out over so many steps
    balance_rate: float = 2e-3
    clip: float = 1.0
    probe_every: int = 200
    probe_seed: int = 900_001

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)


def train_target(plan: TargetPlan, report: Report) -> Target:
    """Train from scratch and return the target in evaluation mode; ``report`` is called after every step."""
    target = build_target(plan.seed)
    target.train()
    eye = nn.Linear(HIDDEN, sum(EYE))
    muon, adam = optimisers(target, plan.matrix_rate, plan.rate, eye.parameters())
    balance = Balance(target)
    humps = [(phase, phase.factor(step)) for phase in plan.phases for step in range(phase.steps)]
    for step, (phase, factor) in enumerate(humps):
        muon.rate = plan.matrix_rate * factor
        for group in adam.param_groups:
            group["lr"] = plan.rate * factor
        shares = LOOK if step < plan.look_steps else phase.shares
        batch = data.collate(data.draw(plan.seed + 1, step, plan.batch, shares), plan.micro)
        numbers = backward(target, eye, batch, plan.aux_weight * max(0.0, 1 - step / plan.aux_steps))
        nn.utils.clip_grad_norm_([p for p in target.parameters() if p.grad is not None], plan.clip)
        muon.step()
        adam.step()
        target.zero_grad(set_to_none=True)
        eye.zero_grad(set_to_none=True)
        balance.step(plan.balance_rate * factor)
        if (step + 1) % plan.probe_every == 0:
            numbers |= probe(target, plan.probe_seed)
        report(step + 1, numbers)
    balance.remove()
    return target.eval()


def probe(target: Target, seed: int, count: int = 400) -> dict[str, float]:
    """Held-out accuracy now, over the mix and of the kinds below 0.97. Changes nothing in the run."""
    target.eval()
    judged = judge(target, data.draw(seed, 0, count))
    target.train()
    weak = {kind: right / asked for kind, (right, asked) in by_kind(judged).items() if right < 0.97 * asked}
    return {"held out": sum(good for _, good in judged) / len(judged), **weak}


EYE = (8, 5, 4, 4)  # classes of colour, shape, row, column


def backward(target: Target, eye: nn.Linear, step: data.Step, aux_weight: float) -> dict[str, float]:
    """Gradients of one step. The vision tower runs once; micro-batches leave their gradients at its output."""
    rows = leaf = None
    if step.pixels is not None and step.grid is not None:
        rows = image_rows(target, step.pixels, step.grid)
        leaf = rows.detach().requires_grad_()
    total = sum(int(batch.predicts().sum()) for batch in step.batches)
    loss_sum, right = 0.0, 0
    for batch in step.batches:
        mine = None if leaf is None or batch.rows is None else leaf[batch.rows]
        hidden = hidden_rows(target, input_rows(target, batch.ids, mine))
        at = batch.predicts()
        logits, truth = target.lm_head(hidden[at]), batch.ids.roll(-1, 1)[at]
        loss = F.cross_entropy(logits, truth, reduction="sum") / total
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
        right += int((logits.argmax(-1) == truth).sum())
    if rows is None or leaf is None or step.truth is None:
        return {"loss": loss_sum, "tokens right": right / total}
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if aux_weight == 0:
        rows.backward(gradient)  # type: ignore[no-untyped-call]
        return {"loss": loss_sum, "tokens right": right / total}
    parts = eye(rows).split(EYE, -1)
    seen = torch.stack([F.cross_entropy(part, step.truth[:, i]) for i, part in enumerate(parts)]).sum()
    torch.autograd.backward([rows, aux_weight * seen], [gradient, torch.ones(())])
    return {"loss": loss_sum, "tokens right": right / total, "eye": seen.item()}


def optimisers(
    model: nn.Module, matrix_rate: float, rate: float, extra: Iterable[nn.Parameter] = ()
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the hidden matrices, AdamW for embeddings, heads, router, position table and all vectors."""
    other = ("embed", "lm_head", "pos_emb", ".gate.weight")
    matrices: list[nn.Parameter] = []
    rest = list(extra)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        hidden = parameter.ndim in (2, 3) and not any(word in name for word in other)
        (matrices if hidden else rest).append(parameter)
    return Muon(matrices, matrix_rate), torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


class Balance:
    """Load balance of the experts without a loss: raise the selection bias of those that got too few tokens."""

    def __init__(self, target: Target) -> None:
        layers = target.model.language_model.layers
        self.gates = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
        self.counts = [torch.zeros_like(gate.e_score_correction_bias) for gate in self.gates]
        self.hooks = [
            gate.register_forward_hook(self._counter(count))
            for gate, count in zip(self.gates, self.counts, strict=True)
        ]

    @staticmethod
    def _counter(count: torch.Tensor) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
            if module.training:  # not while probing
                count.add_(torch.bincount(outputs[2].flatten(), minlength=len(count)))

        return hook

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every bias by ``rate`` towards balance and forget the counts."""
        for gate, count in zip(self.gates, self.counts, strict=True):
            gate.e_score_correction_bias.add_(rate * torch.sign(count.mean() - count))
            count.zero_()

    def remove(self) -> None:
        """Stop counting."""
        for hook in self.hooks:
            hook.remove()
