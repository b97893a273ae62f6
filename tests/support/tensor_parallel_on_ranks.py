"""Compares layers cut over ranks with the whole model: {case: {what: largest difference}}, on the
ranks.

Every rank has the whole model too, and the same samples. Each case computes on all ranks before
results are compared.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, Op, part_of
from hvdtrain.core.arrays import Cut
from hvdtrain.core.extras import implementation
from hvdtrain.extras.tensor.collectives import whole_logits
from hvdtrain.extras.tensor.plan import cut_model, plan_of
from hvdtrain.frameworks.torch.models import gpt, mlp
from hvdtrain.frameworks.torch.recompute import recompute_blocks
from hvdtrain.tasks.torch import TorchLanguage

VOCABULARY = 20
CONTEXT = 7
PADDING = 3
Found = dict[str, float]
FAULTS = (
    "fc1.backward",
    "attention.inputs.backward",
    "head.backward",
    "fc2.forward",
    "tokens.forward",
)


SEQUENCE_FAULTS = (
    "fc1.backward",
    "attention.inputs.backward",
    "head.backward",
    "fc2.forward",
    "tokens.forward",
    "norm1.weight",
)


class Forgetful:
    """A communicator that leaves out the sums over ranks whose names end so."""

    def __init__(self, communicator: Communicator, ending: str) -> None:
        self._communicator = communicator
        self._ending = ending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return x if name.endswith(self._ending) else self._communicator.allreduce(x, name, op)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        if name.endswith(self._ending):
            return CompletedHandle(x[part_of(len(x), self.rank, self.size)])
        return self._communicator.start_reduce_scatter(x, name)


def small_gpt(vocabulary: int = VOCABULARY, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    model = gpt.build("gpt", CONTEXT, vocabulary, layers=2, heads=4, width=16, **options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # away from biases of 0 and norms of 1
    return model


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest difference, divided by the largest number if that is above 1."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.detach() - b.detach()).abs().max()) / max(1.0, float(b.detach().abs().max()))


def gathered(part: torch.Tensor, cut: Cut, communicator: Communicator) -> torch.Tensor:
    """The whole that has these parts."""
    whole = part.new_full(cut.whole_shape(tuple(part.shape)), float("nan"))
    cuts = [cut._replace(part=rank) for rank in range(communicator.size)]
    lengths = [math.prod(each.local_shape(tuple(whole.shape))) for each in cuts]
    for each, found in zip(
        cuts, communicator.allgather(part.flatten(), "parts").split(lengths), strict=True
    ):
        each.put(whole, found)
    return whole


def gradients(
    model: nn.Module,
    whole: nn.Module,
    cuts: Mapping[nn.Parameter, Cut],
    communicator: Communicator,
    sequence: bool = False,
) -> Found:
    """Returns the difference of every parameter's gradient; infinite if a gradient is missing or
    differs between ranks.

    sequence: a rank has a part of the positions, and the gradients of whole parameters are sums
    over ranks.
    """
    theirs = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == theirs.keys()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        if sequence and p not in cuts:
            p.grad = communicator.allreduce(p.grad, name)
        grad = gathered(p.grad, cuts[p], communicator) if p in cuts else p.grad
        # to the last bit
        is_same = len(set(communicator.allgather_object(str(grad.tolist())))) == 1
        found[name] = apart(grad, theirs[name].grad) if is_same else float("inf")
    return found


def language(
    options: dict[str, Any],
    communicator: Communicator,
    recompute: Literal["none", "all"] = "none",
    sequence: bool = False,
) -> Found:
    """Logits, the loss of each sample with smoothing and padding, and gradients of two passes; then
    without gradients."""
    whole = small_gpt(**options)
    model = copy.deepcopy(whole)
    recompute_blocks(model, recompute, "tests")
    cuts = cut_model(model, plan_of(model, "tests"), communicator, sequence=sequence)
    part = TorchLanguage(PADDING, 0.2)
    found: Found = {}
    for number in range(2):
        torch.manual_seed(10 + number)
        batch = {"tokens": torch.randint(VOCABULARY, (3, CONTEXT + 1), dtype=torch.uint8)}
        outputs = model(part.inputs(batch))
        expected = whole(part.inputs(batch))
        mine = part.each(outputs, batch, training=True)
        theirs = part.each(expected, batch, training=True)
        weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
        (mine.loss * weights).sum().backward()
        (theirs.loss * weights).sum().backward()
        same = len(set(communicator.allgather_object(str(mine.loss.tolist())))) == 1
        found |= {
            f"logits{number}": apart(whole_logits(outputs), expected),
            f"loss{number}": apart(mine.loss, theirs.loss) if same else 9.0,
        }
        assert torch.equal(mine.terms["tokens"], theirs.terms["tokens"])
    found |= gradients(model, whole, cuts, communicator, sequence)
    with torch.no_grad():
        mine, theirs = (
            part.each(m.eval()(part.inputs(batch)), batch, training=False) for m in (model, whole)
        )
        found["evaluation"] = apart(mine.loss, theirs.loss)
        if sample := implementation("log.samples"):  # else this copy draws no tokens
            draw = partial(
                import_module(".of_torch", sample.rpartition(".")[0]).continue_sequences,
                prompts=batch["tokens"][:, :2].long(),
                length=12,
                tokens=VOCABULARY,
                temperature=1.0,
                seed=4,
            )
            found["drawn"] = float((draw(model) != draw(whole)).sum())
    is_tied = bool(options.get("tied"))
    assert (model.head.weight is model.tokens.weight) == is_tied
    return found


def perceptron(widths: tuple[int, ...], communicator: Communicator) -> Found:
    torch.manual_seed(5)
    whole = mlp.build("mlp", (4, 3, 1), 5, widths=widths).double()
    model = copy.deepcopy(whole)
    cuts = cut_model(model, plan_of(model, "tests"), communicator)
    x = torch.randn(6, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (6,))
    logits = model(x)
    expected = whole(x)
    functional.cross_entropy(logits, y).backward()
    grad = x.grad
    x.grad = None
    functional.cross_entropy(expected, y).backward()
    assert grad is not None and x.grad is not None
    return {
        "logits": apart(logits, expected),
        "x": apart(grad, x.grad),
        **gradients(model, whole, cuts, communicator),
    }


def half_numbers(communicator: Communicator, sequence: bool = False) -> Found:
    """Compares under autocast with bfloat16, which the engine may not be able to sum, up to its 8
    bits. Weights and gradients are float32."""
    whole = small_gpt().float()
    model = copy.deepcopy(whole)
    cut_model(model, plan_of(model, "tests"), communicator, sequence=sequence)
    tokens = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
        expected = whole(tokens)
    assert found.local.dtype == expected.dtype == torch.bfloat16
    loss = found.to(torch.float32).cross_entropy(tokens, 0.1, -100)
    loss.mean().backward()
    functional.cross_entropy(
        expected.float().flatten(0, 1), tokens.flatten(), label_smoothing=0.1
    ).backward()
    theirs = dict(whole.named_parameters())["blocks.0.norm1.weight"].grad
    mine = dict(model.named_parameters())["blocks.0.norm1.weight"].grad
    assert mine is not None and theirs is not None
    mine = communicator.allreduce(mine, "norm1.weight") if sequence else mine
    return {
        "logits": apart(whole_logits(found).float(), expected.float()),
        "gradient": apart(mine, theirs),
    }


def kept_of_a_block(communicator: Communicator, sequence: bool) -> float:
    """Returns how many numbers forward keeps for backward in one more block, without its
    parameters."""
    found = []
    for layers in (1, 2):
        model = gpt.build("gpt", CONTEXT, VOCABULARY, layers=layers, heads=4, width=16).double()
        cut_model(model, plan_of(model, "tests"), communicator, sequence=sequence)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        weights = sum(storage.nbytes() for storage in storages.values())

        def see(x: torch.Tensor, storages: dict[int, Any] = storages) -> torch.Tensor:
            if x.is_floating_point():
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
            model(torch.zeros(3, CONTEXT, dtype=torch.int64)).local.sum().backward()
        found.append(sum(storage.nbytes() for storage in storages.values()) - weights)
    return (found[1] - found[0]) / 8


def kept(communicator: Communicator) -> Found:
    """Against the count of Korthikanti et al. 2022, table 2: sbh (10 + 24 / t) bytes of 16-bit
    numbers with masks of dropout; with parts of the positions sbh 34 / t. Without masks these are 4
    + 12 / t and 16 / t numbers; the statistics of norms and of attention come to them.
    """
    size = communicator.size
    positions = 3 * CONTEXT
    mine = len(range(CONTEXT)[part_of(CONTEXT, communicator.rank, size)]) * 3
    of_cut_layers = positions * (12 * 16 + 4) / size
    expected = {
        False: 4 * (16 + 1) * positions + of_cut_layers,
        True: 4 * (16 + 1) * mine + of_cut_layers,
    }
    return {
        f"sequence={way}": abs(kept_of_a_block(communicator, way) - numbers)
        for way, numbers in expected.items()
    }


def without(ending: str, communicator: Communicator, sequence: bool = False) -> Found:
    """Makes the same comparison with a fault, which it has to notice."""
    return language({}, Forgetful(communicator, ending), sequence=sequence)


def cases() -> dict[str, Callable[[Communicator], Found]]:
    return {
        "gpt": partial(language, {}),
        "gpt-tied": partial(language, {"tied": True}),
        "gpt-uneven": partial(language, {"tied": True, "vocabulary": VOCABULARY + 1}),
        "gpt-recomputed": partial(language, {}, recompute="all"),
        "mlp-1": partial(perceptron, (8,)),
        "mlp-2": partial(perceptron, (8, 12)),
        "mlp-3": partial(perceptron, (8, 12, 4)),
        "half": half_numbers,
        "kept": kept,
        "gpt-sequence": partial(language, {}, sequence=True),
        "gpt-sequence-recomputed": partial(
            language, {"tied": True, "vocabulary": VOCABULARY + 1}, recompute="all", sequence=True
        ),
        "half-sequence": partial(half_numbers, sequence=True),
        **{f"without-{ending}": partial(without, ending) for ending in FAULTS},
        **{
            f"without-{ending}-sequence": partial(without, ending, sequence=True)
            for ending in SEQUENCE_FAULTS
        },
    }


def apart_by_case(communicator: Communicator) -> dict[str, dict[str, float]]:
    warnings.simplefilter("error")
    return {case: run(communicator) for case, run in cases().items()}
