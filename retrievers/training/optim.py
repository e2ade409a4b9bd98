"""Muon for the matrices of small models, batched over matrices of one shape."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315
"""Newton-Schulz iterations and their coefficients (Jordan et al. 2024), which bring singular values near 1."""


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; a step has the root mean square of an AdamW step, so that rates can be shared.

    PyTorch's own iterates matrix by matrix in bfloat16, which is slow where processors have no units for it.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))
                for parameter, update in zip(parameters, orthogonal(updates), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """(..., m, n) with singular values near 1 in place of their own."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    found: Tensor = x.mT if tall else x
    return found
