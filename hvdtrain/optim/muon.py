"""Muon: momentum with orthogonalized matrices, so that a step moves equally far in all their
directions. Other parameters use AdamW or SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.optim.adam import check_moments
from hvdtrain.optim.adamw import AdamW
from hvdtrain.optim.groups import ScaledRule
from hvdtrain.optim.rule import Array, Ops, Rule
from hvdtrain.optim.sgd import Sgd

_REST = ScaledRule(AdamW(0.95), rate=0.015, own_momentum=0.9)


@dataclass(frozen=True)
class Muon:
    """v = m v + (1 - m) g, p = (1 - lr d) p - lr s O(v); Nesterov: O((1 - m) g + m v). O is
    newton_schulz(); s depends on the shape.

    A convolution kernel counts as a matrix (outputs, inputs x height x width). Source: Jordan 2024,
    kellerjordan.github.io/posts/muon; adjust=match_rms_adamw: Liu et al. 2025, arXiv:2502.16982,
    2.2; both as in torch.optim.Muon.
    """

    nesterov: bool = True
    rounds: int = 5
    bf16: bool = False
    adjust: Literal["original", "match_rms_adamw", "none"] = "original"
    unit_rows: bool = False
    rest: tuple[str, ...] = ()
    rule_of_rest: Rule = _REST
    factor: float = 1.0  # s
    rows: int = 0  # rows of the parameter
    eps: float = 1e-7
    momentum: float = 0.95

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        if len(shape) < 2 or any(fnmatchcase(name, pattern) for pattern in self.rest):
            return self.rule_of_rest
        rows = shape[0]
        columns = math.prod(shape[1:])
        scales = {
            "original": max(1.0, rows / columns) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
            "none": 1.0,
        }
        return replace(
            self, factor=scales[self.adjust], rows=rows if self.unit_rows else 0, rest=()
        )

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        return (ops.zeros_like(p),)

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        v = ops.axpy(1 - h.momentum, g, ops.scale(h.momentum, state[0]))
        direction = (
            ops.axpy(1 - h.momentum, g, ops.scale(h.momentum, ops.copy(v))) if self.nesterov else v
        )
        step = ops.orthogonalize(
            direction, P, self.rounds, self.eps, "bfloat16" if self.bf16 else ""
        )
        if self.unit_rows:
            norm = ops.norm(P)
            P = ops.scale(
                ops.where(norm > 0, self.rows**0.5 / ops.where(norm > 0, norm, 1.0), 1.0), P
            )
        return ops.axpy(-h.lr * self.factor, step, ops.scale(1 - h.lr * h.weight_decay, P)), (v,)


def build(
    *,
    nesterov: bool = True,
    rounds: int = 5,
    bf16: bool = False,
    adjust: Literal["original", "match_rms_adamw", "none"] = "original",
    unit_rows: bool = False,
    rest: tuple[str, ...] = (
        "*tokens*",
        "*positions*",
        "*embed*",
        "head.*",
        "*.head.*",
        "*_head.*",
        "fc.*",
        "*.fc.*",
    ),
    rest_rule: Literal["adamw", "sgd"] = "adamw",
    rest_rate: float = 0.015,
    rest_momentum: float = 0.9,
    rest_beta2: float = 0.95,
) -> Rule:
    """Returns the rule of optim.name=muon. A typical rate is 0.02; with match_rms_adamw and
    rest_rate=1, use AdamW's rate.

    nesterov: true: look ahead along the momentum (Nesterov)
    rounds: iterations of Newton-Schulz, which decide how nearly orthogonal a step is
    bf16: true: the rounds in bfloat16, as in torch.optim.Muon; torch and jax
    adjust: factor of a step: original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2
        sqrt(max(rows, columns)); none: 1
    unit_rows: true: a matrix is first scaled to the norm sqrt(rows), so that its rows have norm 1
        in the mean (airbench)
    rest: names of parameters, with * for any characters, that rest_rule updates: embeddings and the
        last layer; so are biases and norms
    rest_rule: adamw or sgd (with Nesterov as in `nesterov`), for parameters of one dimension and
        those that `rest` names
    rest_rate: their rate, as a share of that of the matrices
    rest_momentum: their momentum, or first beta
    rest_beta2: second beta of their adamw
    """
    if not 1 <= rounds <= 100:
        raise UserError(
            f"optim.rounds is {rounds}", "optim.rounds", "give 1 to 100, as in optim.rounds=5"
        )
    if not 0 <= rest_rate < math.inf:
        raise UserError(
            f"rest_rate={rest_rate} is negative or not finite",
            "optim.rest_rate",
            "give 0 or more, as in optim.rest_rate=0.015",
        )
    if not 0 <= rest_momentum < 1:
        what = f"a rest_momentum of {rest_momentum} does not define a running mean"
        raise UserError(
            what,
            "optim.rest_momentum",
            "give 0 or more and less than 1, as in optim.rest_momentum=0.9",
        )
    check_moments(rest_beta2, 0.0, "optim.rest_beta2")
    of_rest = Sgd(nesterov) if rest_rule == "sgd" else AdamW(rest_beta2)
    return Muon(
        nesterov,
        rounds,
        bf16,
        adjust,
        unit_rows,
        rest,
        ScaledRule(of_rest, rate=rest_rate, own_momentum=rest_momentum),
    )
