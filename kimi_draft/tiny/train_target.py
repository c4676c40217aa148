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
from kimi_draft.tiny.model import Target, build_target, hidden_rows, image_rows, input_rows
from kimi_draft.tiny.muon import Muon
from kimi_draft.tiny.task import MIX

Report = Callable[[int, dict[str, float]], None]

# The first part of the run asks what the rest builds on: looking one cell up, and copying from a text.
WARM_UP = {"read": 0.2, "name": 0.2, "two_images": 0.2, "tool": 0.08, "text_repeat": 0.16, "text_last": 0.06}
WARM_UP["alike"] = round(1 - sum(WARM_UP.values()), 6)


@dataclass(frozen=True)
class TargetPlan:
    """All that decides the target's weights, besides the code."""

    seed: int = 0
    steps: int = 2400
    batch: int = 64
    micro: int = 4
    matrix_rate: float = 0.02  # Muon
    rate: float = 3e-3  # AdamW: embeddings, head, router, norms, biases
    warm_up_share: float = 0.15
    aux_weight: float = 0.5
    aux_until: float = 0.6
    balance_rate: float = 2e-3
    clip: float = 1.0


def schedule(step: int, steps: int, warm_up: int = 40) -> float:
    """Learning-rate factor: linear warm-up, flat for 40 % of the run, then linear down to 2 %."""
    decay = max(0.0, step / steps - 0.4) / 0.6
    return min(1.0, (step + 1) / warm_up) * (1 - 0.98 * decay)


def train_target(plan: TargetPlan, report: Report) -> Target:
    """Train from scratch and return the target in evaluation mode; ``report`` is called after every step."""
    target = build_target(plan.seed)
    target.train()
    eye = nn.Linear(HIDDEN, sum(EYE))
    muon, adam = optimisers(target, plan.matrix_rate, plan.rate, eye.parameters())
    balance = Balance(target)
    for step in range(plan.steps):
        progress = step / plan.steps
        factor = schedule(step, plan.steps)
        muon.rate = plan.matrix_rate * factor
        for group in adam.param_groups:
            group["lr"] = plan.rate * factor
        shares = WARM_UP if progress < plan.warm_up_share else MIX
        batch = data.collate(data.draw(plan.seed + 1, step, plan.batch, shares), plan.micro)
        aux_weight = plan.aux_weight * max(0.0, 1 - progress / plan.aux_until)
        numbers = backward(target, eye, batch, aux_weight)
        nn.utils.clip_grad_norm_([p for p in target.parameters() if p.grad is not None], plan.clip)
        muon.step()
        adam.step()
        target.zero_grad(set_to_none=True)
        eye.zero_grad(set_to_none=True)
        balance.step(plan.balance_rate * factor)
        report(step + 1, numbers)
    balance.remove()
    return target.eval()


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
