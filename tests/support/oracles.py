"""The optimizers of torch, timm, pytorch_optimizer and optax that our rules are compared with, in
one table that drives every test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import optax
import torch

from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.core.progress import Hyper
from hvdtrain.optim.rule import is_excluded

import_torchvision()  # timm imports it, and would fail with a CPU build of torch

SHAPES = [(4, 3, 3, 2), (5, 4), (7,), (1, 6), (3,)]
STEPS = 20
M = 0.85  # no rule's own


class Run(NamedTuple):
    """20 steps with gradients of every scale and a rate that rises and falls."""

    rate: float
    decay: float = 0.05
    exclude: bool = True
    steady: bool = False

    def weights(self) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        return [rng.normal(size=shape) for shape in SHAPES]

    def gradients(self, step: int) -> list[np.ndarray]:
        rng = np.random.default_rng(100 + step)
        return [rng.normal(scale=10.0 ** (i - 2), size=shape) for i, shape in enumerate(SHAPES)]

    def hypers(self) -> list[Hyper]:
        rates = [
            self.rate * (1 if self.steady else 0.1 + abs(np.sin(step))) for step in range(STEPS)
        ]
        return [
            Hyper(float(rate), M, self.decay, batch=1, step=step) for step, rate in enumerate(rates)
        ]

    def excluded(self) -> list[bool]:
        return [self.exclude and is_excluded(shape) for shape in SHAPES]


Arrays = list[np.ndarray]
Oracle = Callable[[Run], Arrays]


def by_torch(
    make: Callable[[list[dict]], torch.optim.Optimizer], corrected: bool = False
) -> Oracle:
    """Where `corrected`, momentum is multiplied by lr / the lr before: the rate outside of the
    momentum then does as one inside of it."""

    def walk(run: Run) -> Arrays:
        weights = [torch.nn.Parameter(torch.tensor(w)) for w in run.weights()]
        decays = [0.0 if excluded else run.decay for excluded in run.excluded()]
        optimizer = make(
            [
                {"params": [w], "weight_decay": decay}
                for w, decay in zip(weights, decays, strict=True)
            ]
        )
        hypers = run.hypers()
        for before, h in zip([hypers[0], *hypers], hypers, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = h.lr
                if corrected:
                    group["momentum"] = M * before.lr / h.lr
            for w, g in zip(weights, run.gradients(h.step), strict=True):
                w.grad = torch.tensor(g)
            optimizer.step()
        return [w.detach().numpy() for w in weights]

    return walk


def by_optax(make: Callable[..., Any]) -> Oracle:
    def walk(run: Run) -> Arrays:
        with jax.enable_x64(True):
            rates = jax.numpy.array([h.lr for h in run.hypers()])
            transform = make(
                lambda count: rates[count], run.decay, [not excluded for excluded in run.excluded()]
            )
            weights = [jax.numpy.array(w) for w in run.weights()]
            state = transform.init(weights)
            for step in range(STEPS):
                updates, state = transform.update(
                    [jax.numpy.array(g) for g in run.gradients(step)], state, weights
                )
                weights = optax.apply_updates(weights, updates)
            return [np.asarray(w) for w in weights]

    return walk


def timm(name: str, corrected: bool = False, **options: Any) -> Oracle:
    def make(groups: list[dict]) -> torch.optim.Optimizer:
        return getattr(importlib.import_module("timm.optim"), name)(groups, **options)

    return by_torch(make, corrected)


def kozistr(groups: list[dict]) -> torch.optim.Optimizer:
    return importlib.import_module("pytorch_optimizer").NovoGrad(groups, betas=(M, 0.98))


def optax_lars(rate: Any, decay: float, keep: list[bool]) -> Any:
    return optax.lars(rate, decay, weight_decay_mask=keep, trust_ratio_mask=keep, momentum=M)


def torchs_muon(
    adjust: str, nesterov: bool, rest: Callable[[list[dict]], torch.optim.Optimizer]
) -> Oracle:
    """torch.optim.Muon, with its rounds in float64, of matrices and kernels as matrices; `rest` of
    all others, at half the rate.

    adjust="none": its "original", whose factor the rate and the decay take back; matrices are
    scaled to unit rows before each step.
    """

    def walk(run: Run) -> Arrays:
        weights = [
            torch.nn.Parameter(torch.tensor(w).flatten(1) if w.ndim > 1 else torch.tensor(w))
            for w in run.weights()
        ]
        factors = {
            w: max(1.0, w.shape[0] / w.shape[1]) ** 0.5 if adjust == "none" else 1.0
            for w in weights
            if w.ndim > 1
        }
        options = {
            "momentum": M,
            "nesterov": nesterov,
            "adjust_lr_fn": "original" if adjust == "none" else adjust,
        }
        matrices = torch.optim.Muon(
            [{"params": [w], "weight_decay": run.decay * factors[w]} for w in factors], **options
        )
        others = rest(
            [
                {"params": [w], "weight_decay": 0.0 if run.exclude else run.decay}
                for w in weights
                if w.ndim == 1
            ]
        )
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.clone()):
            for h in run.hypers():
                for group in matrices.param_groups:
                    group["lr"] = h.lr / factors[group["params"][0]]
                for group in others.param_groups:
                    group["lr"] = h.lr * 0.5
                for w, g in zip(weights, run.gradients(h.step), strict=True):
                    w.grad = torch.tensor(g).view(w.shape)
                    if adjust == "none" and w in factors:
                        w.data *= len(w) ** 0.5 / w.data.norm()
                matrices.step()
                others.step()
        return [w.detach().numpy().reshape(shape) for w, shape in zip(weights, SHAPES, strict=True)]

    return walk


class Case(NamedTuple):
    name: str
    options: dict[str, Any]
    run: Run
    oracles: dict[str, Oracle]


BETAS = {"betas": (M, 0.999)}
INNER = {"momentum": M, "trust_coeff": 0.02}
CASES = {
    "sgd": Case(
        "sgd", {}, Run(0.1), {"torch": by_torch(lambda groups: torch.optim.SGD(groups, momentum=M))}
    ),
    "sgd nesterov": Case(
        "sgd",
        {"nesterov": True},
        Run(0.1),
        {"torch": by_torch(lambda groups: torch.optim.SGD(groups, momentum=M, nesterov=True))},
    ),
    "adam": Case(
        "adam", {}, Run(0.1), {"torch": by_torch(lambda groups: torch.optim.Adam(groups, **BETAS))}
    ),
    "adamw": Case(
        "adamw",
        {"beta2": 0.99, "eps": 1e-4},
        Run(0.1),
        {
            "torch": by_torch(lambda groups: torch.optim.AdamW(groups, betas=(M, 0.99), eps=1e-4)),
            "optax": by_optax(
                lambda rate, decay, keep: optax.adamw(
                    rate, M, 0.99, 1e-4, weight_decay=decay, mask=keep
                )
            ),
        },
    ),
    "lars": Case("lars", {"eps": 1e-7}, Run(20.0), {"timm": timm("Lars", momentum=M, eps=1e-7)}),
    "lars paper": Case(
        "lars",
        {"form": "paper"},
        Run(20.0),
        {"timm": timm("Lars", corrected=True, momentum=M, eps=0.0)},
    ),
    "lars paper, no decay": Case(
        "lars", {"form": "paper"}, Run(20.0, decay=0.0), {"optax": by_optax(optax_lars)}
    ),
    "larc": Case("larc", {}, Run(0.1), {"timm": timm("Lars", trust_clip=True, **INNER)}),
    "larc scale": Case("larc", {"mode": "scale"}, Run(1.0), {"timm": timm("Lars", **INNER)}),
    "lamb": Case("lamb", {}, Run(0.1), {"timm": timm("Lamb", max_grad_norm=None, **BETAS)}),
    "lamb, all alike": Case(
        "lamb",
        {},
        Run(0.1, exclude=False),
        {"optax": by_optax(lambda rate, decay, _: optax.lamb(rate, M, weight_decay=decay))},
    ),
    "muon": Case(
        "muon",
        {"rest_rate": 0.5},
        Run(0.1),
        {
            "torch": torchs_muon(
                "original", True, lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95))
            )
        },
    ),
    "muon, adjusted": Case(
        "muon",
        {
            "adjust": "match_rms_adamw",
            "nesterov": False,
            "rest_rule": "sgd",
            "rest_rate": 0.5,
            "rest_momentum": 0.8,
        },
        Run(0.1, exclude=False),
        {
            "torch": torchs_muon(
                "match_rms_adamw", False, lambda groups: torch.optim.SGD(groups, momentum=0.8)
            )
        },
    ),
    "muon, unit rows": Case(
        "muon",
        {"adjust": "none", "unit_rows": True, "rest_rate": 0.5},
        Run(0.1),
        {
            "torch": torchs_muon(
                "none", True, lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95))
            )
        },
    ),
    "novograd": Case(
        "novograd",
        {},
        Run(0.1),
        {"timm": timm("NvNovoGrad", betas=(M, 0.98)), "kozistr": by_torch(kozistr)},
    ),
}
