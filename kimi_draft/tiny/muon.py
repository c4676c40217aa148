"""Muon: momentum whose matrices are orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024).

Matrices of one shape are stacked and orthogonalised together; each expert of an [experts, rows, columns] parameter
counts as a matrix of its own.
"""

from collections.abc import Iterable

import torch
from torch import nn

# The quintic that the authors tuned: it pushes singular values to about 1 in five rounds, without converging exactly.
QUINTIC = (3.4445, -4.7750, 2.0315)
MOMENTUM, DECAY, ROUNDS = 0.95, 0.01, 5


def orthogonalise(stack: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns] -> the nearest semi-orthogonal matrices, approximately (singular values 0.7 to 1.2)."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    out: torch.Tensor = x.mT if tall else x
    return out


class Muon:
    """Optimiser for parameters of two or three dimensions; call :meth:`step` after backward."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float) -> None:
        self.rate = rate
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault((parameter.shape[-2], parameter.shape[-1]), []).append(parameter)
        self.momentum = {
            shape: torch.zeros(sum(p.numel() for p in group) // (shape[0] * shape[1]), *shape)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """One update; a parameter without a gradient (an expert that saw no token) counts as zero."""
        for (rows, columns), group in self.groups.items():
            grads = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1, rows, columns) for p in group]
            grad = torch.cat(grads)
            momentum = self.momentum[rows, columns].lerp_(grad, 1 - MOMENTUM)
            update = orthogonalise(grad.lerp(momentum, MOMENTUM))
            rate = self.rate * max(1.0, rows / columns) ** 0.5
            for parameter, part in zip(group, torch.split(update, [len(g) for g in grads]), strict=True):
                parameter.mul_(1 - self.rate * DECAY).add_(part.reshape(parameter.shape), alpha=-rate)
