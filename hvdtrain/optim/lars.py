"""LARS: SGD with momentum, with each layer's learning rate scaled by the norm of its weights
divided by the norm of its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.optim.rule import Array, Ops, Rule, Scalar


@dataclass(frozen=True)
class Lars:
    """a = trust |p| / (|g| + d |p| + eps), or 1 if |p| or |g| is 0 (You, Gitman, Ginsburg 2017,
    arXiv:1708.03888, eq. 6 and algorithm 1).

    form=paper: v = m v + lr a (g + d p), p = p - v. form=torch: v = m v + a (g + d p), p = p - lr
    v. They are equal while lr is constant. Deviations from the paper, covered by tests: eps is from
    MLPerf, and a layer with a zero gradient decays unscaled, as in timm, because a is 1.
    """

    form: Literal["torch", "paper"] = "torch"
    trust: float = 0.001
    eps: float = 0.0
    adapt: bool = True
    momentum: float = 0.9

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        return replace(self, adapt=not excluded)

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return (ops.zeros_like(p),)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        # the learning rate multiplies the input of the momentum (paper) or its output (torch)
        before, after = (1.0, h.lr) if self.form == "torch" else (h.lr, 1.0)
        a = before * self._trust_ratio(g, P, h, ops)
        v = ops.axpy(a * h.weight_decay, P, ops.axpy(a, g, ops.scale(h.momentum, state[0])))
        return ops.axpy(-after, v, P), (v,)

    def _trust_ratio(self, g: Array, p: Array, h: Hyper, ops: Ops) -> Scalar | float:
        if not self.adapt:
            return 1.0
        weight_norm = ops.norm(p)
        gradient_norm = ops.norm(g)
        denominator = gradient_norm + h.weight_decay * weight_norm + self.eps
        return ops.trusted(
            ratio_or_one(
                self.trust * weight_norm,
                denominator,
                both_positive(weight_norm, gradient_norm),
                ops,
            )
        )


def both_positive(a: Scalar, b: Scalar) -> Any:
    """Whether both norms are positive."""
    return (a > 0) & (b > 0)


def ratio_or_one(numerator: Scalar, denominator: Scalar, where: Any, ops: Ops) -> Scalar:
    """Returns numerator / denominator, or 1 outside `where`, without dividing there: NumPy would
    warn about a division by 0."""
    return ops.where(where, numerator / ops.where(where, denominator, 1.0), 1.0)


def check_ratio(trust: float, eps: float) -> None:
    """Raises UserError for an invalid trust or eps."""
    if not 0 < trust < math.inf:
        raise UserError(
            f"with a trust of {trust} no layer would be updated",
            "optim.trust",
            "give a number above 0, as in optim.trust=0.001",
        )
    if not 0 <= eps < math.inf:
        raise UserError(
            f"eps={eps} is negative or not finite",
            "optim.eps",
            "give 0 or more, as in optim.eps=1e-8",
        )


def build(
    *, form: Literal["torch", "paper"] = "torch", trust: float = 0.001, eps: float = 0.0
) -> Rule:
    """Returns the rule of optim.name=lars.

    form: paper: the rate is inside the momentum, as in the paper, Caffe and MLPerf; torch: outside,
        as in torch.optim.SGD
    trust: the share of a layer's norm that it moves by at a rate of 1
    eps: added under the ratio (MLPerf: 1e-7)
    """
    check_ratio(trust, eps)
    return Lars(form, trust, eps)
