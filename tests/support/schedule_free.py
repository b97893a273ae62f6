"""An optimizer with two sets of weights, which train() and eval() switch: schedule-free SGD
(Defazio et al. 2024, arXiv:2405.15682)."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """In training the weights are y = (1 - beta) z + beta x; in evaluation x, the mean of z, which
    descends along gradients at y."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "is_training": False})

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in (group for group in self.param_groups if group["is_training"] != training):
            for p in (p for p in group["params"] if "z" in self.state.get(p, {})):
                p.lerp_(
                    self.state[p]["z"], 1 - group["beta"] if training else 1 - 1 / group["beta"]
                )
            group["is_training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["is_training"], "step() with the weights to evaluate"
            share = 1 / (group["steps"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(
                    p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1)
                )
                z.sub_(group["lr"] * p.grad)
            group["steps"] += 1
