"""Training with hvdtrain.horovod's optimizer, checked against one process, as one program for the
ranks.

python tests/support/horovod_training.py OUT.json        writes {check: failure or ""}
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from horovod_checks import failure_of
from torch import nn

import hvdtrain.horovod as hvd
from hvdtrain.errors import UserError

# rows of a rank in a step
STEPS = 4
ROWS = 6


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 4, generator=made, dtype=torch.float64), torch.randint(
        0, 3, (ROWS,), generator=made
    )


def loss_of(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = data(step, rank)
    return nn.functional.cross_entropy(net(x), y)


def alone(ranks: int, scale: float = 1.0, clip: float | None = None) -> list[torch.Tensor]:
    """The weights after training in one process, by the mean of the losses of all ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(net, step, rank) for rank in range(ranks)) * scale / ranks).backward()  # type: ignore[union-attr]
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def trained(change: Callable[[Any, int], None] | None = None, **options: Any) -> list[torch.Tensor]:
    """The weights after training on the ranks. change: is called between backward and step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if callable(options.get("groups")):
        options["groups"] = options["groups"](net)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), **options
    )
    passes = options.get("backward_passes_per_step", 1)
    for step in range(STEPS):
        wrapped.zero_grad()
        for _ in range(passes):
            (loss_of(net, step, hvd.rank()) / passes).backward()
        if change is not None:
            change(wrapped, step)
        else:
            wrapped.step()
    return [parameter.detach() for parameter in net.parameters()]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> Any:
    for one, other in zip(found, expected, strict=True):
        yield one, (other.numpy(), "float64")


def clip(wrapped: Any, step: int) -> None:
    wrapped.synchronize()
    nn.utils.clip_grad_norm_([p for group in wrapped.param_groups for p in group["params"]], 0.05)
    with wrapped.skip_synchronize():
        wrapped.step()


def averages(_: Any) -> Any:
    yield from same(trained(), alone(hvd.size()))


def sums(_: Any) -> Any:
    yield from same(trained(op=hvd.Sum), alone(hvd.size(), scale=hvd.size()))


def several_passes(_: Any) -> Any:
    yield from same(trained(backward_passes_per_step=3), alone(hvd.size()))


def predivided(_: Any) -> Any:
    yield from same(trained(gradient_predivide_factor=4.0), alone(hvd.size()))


def grouped(_: Any) -> Any:
    yield from same(trained(groups=2), alone(hvd.size()))
    with warnings.catch_warnings(record=True):
        yield from same(trained(num_groups=3), alone(hvd.size()))
    yield from same(trained(groups=lambda net: [[net[0].weight, net[2].bias]]), alone(hvd.size()))


def clipped(_: Any) -> Any:
    yield from same(trained(clip), alone(hvd.size(), clip=0.05))


def of_a_set(_: Any) -> Any:
    """Rank 0 is a set by itself, so its weights equal those of one process."""
    if hvd.size() == 1:
        return
    process_set = hvd.add_process_set([0])
    found = trained(process_set=process_set)
    if hvd.rank() == 0:
        yield from same(found, alone(1))
    hvd.remove_process_set(process_set)


def by_closure(_: Any) -> Any:
    net = model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            wrapped.zero_grad()
            loss = loss_of(net, step, hvd.rank())
            loss.backward()
            return loss

        wrapped.step(closure)
    yield from same([parameter.detach() for parameter in net.parameters()], alone(hvd.size()))


def scheduled(_: Any) -> Any:
    """A schedule of the learning rate, made before the optimizer is wrapped or after: 0.1, then
    0.05."""
    for is_first in (True, False):
        nets = model(), model()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            for optimizer in optimizers[: 2 if is_first else 1]
        ]
        wrapped = hvd.DistributedOptimizer(optimizers[1], nets[1].named_parameters())
        schedules += [] if is_first else [torch.optim.lr_scheduler.StepLR(wrapped, 2, 0.5)]
        for step in range(STEPS):
            for optimizer in (optimizers[0], wrapped):
                optimizer.zero_grad()
            (
                sum(loss_of(nets[0], step, rank) for rank in range(hvd.size())) / hvd.size()
            ).backward()  # type: ignore[union-attr]
            loss_of(nets[1], step, hvd.rank()).backward()
            optimizers[0].step()
            wrapped.step()
            with warnings.catch_warnings():
                # the scheduler that was created first does not see the wrapped optimizer's steps
                warnings.simplefilter("ignore")
                for schedule in schedules:
                    schedule.step()
        assert wrapped.param_groups[0]["lr"] == 0.025, wrapped.param_groups[0]["lr"]
        yield from same(
            [p.detach() for p in nets[1].parameters()], [p.detach() for p in nets[0].parameters()]
        )


def scaled(_: Any) -> Any:
    """GradScaler, as Horovod's documentation uses it; a gradient that overflows on one rank skips
    the step on all of them."""
    net = model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in (0, 1, -1, 2, 3):
        wrapped.zero_grad()
        loss = (
            loss_of(net, step, hvd.rank())
            if step >= 0
            else loss_of(net, 0, hvd.rank()) * (torch.inf if hvd.rank() == 0 else 1.0)
        )
        scaler.scale(loss).backward()
        wrapped.synchronize()
        scaler.unscale_(wrapped)
        with wrapped.skip_synchronize():
            scaler.step(wrapped)
        scaler.update()
    assert scaler.get_scale() == 512.0, scaler.get_scale()
    yield from same([parameter.detach() for parameter in net.parameters()], alone(hvd.size()))


def compiled(_: Any) -> Any:
    """torch.compile around the model: the same gradients start."""
    net = model()
    fast = torch.compile(net, backend="aot_eager")
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), fast.named_parameters()
    )
    for step in range(STEPS):
        wrapped.zero_grad()
        loss_of(fast, step, hvd.rank()).backward()
        wrapped.step()
    yield from same([parameter.detach() for parameter in net.parameters()], alone(hvd.size()))


def by_lbfgs(_: Any) -> Any:
    """An optimizer that calls its closure several times in a step, with the mean loss of all
    ranks."""
    net = model()
    other = model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe"), net.named_parameters()
    )
    plain = torch.optim.LBFGS(other.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        wrapped.zero_grad()
        loss = loss_of(net, 0, hvd.rank())
        loss.backward()
        return hvd.allreduce(loss.detach(), name="loss")

    def alone_closure() -> torch.Tensor:
        plain.zero_grad()
        loss = sum(loss_of(other, 0, rank) for rank in range(hvd.size())) / hvd.size()
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    wrapped.step(closure)
    plain.step(alone_closure)
    found = [p.detach().float() for p in net.parameters()]
    for one, expected in zip(
        found, [p.detach().float().numpy() for p in other.parameters()], strict=True
    ):
        yield one, (expected, "float32")


def unused_parameters(_: Any) -> Any:
    """A rank that does not use a layer reduces zeros for it."""
    net = nn.ModuleList([nn.Linear(2, 1).double(), nn.Linear(2, 1).double()])
    hvd.broadcast_parameters(net.state_dict(), 0)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters()
    )
    before = [layer.weight.detach().clone() for layer in net]  # type: ignore[union-attr]
    x = torch.ones(1, 2, dtype=torch.float64)
    sum(layer(x) for layer in net[: 1 if hvd.rank() else 2]).sum().backward()  # type: ignore[union-attr,arg-type]
    wrapped.step()
    yield net[0].weight.detach(), ((before[0] - 1.0).numpy(), "float64")
    yield net[1].weight.detach(), ((before[1] - 1.0 / hvd.size()).numpy(), "float64")


def sparse_gradients(_: Any) -> Any:
    for as_dense in (False, True):
        torch.manual_seed(3)
        table = nn.Embedding(6, 2, sparse=True).double()
        before = table.weight.detach().clone()
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        wrapped = hvd.DistributedOptimizer(
            optimizer, table.named_parameters(), sparse_as_dense=as_dense
        )
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        wrapped.step()
        step = torch.zeros(6, 2, dtype=torch.float64)
        step[: hvd.size()] = 1.0 / hvd.size()
        step[5] = 1.0
        yield table.weight.detach(), ((before - step).numpy(), "float64")


def adasum_steps(_: Any) -> Any:
    """Equal changes on all ranks are averaged, so the weights equal those of one rank that trains
    with rank 0's data."""
    net = model()
    other = model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=hvd.Adasum
    )
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(STEPS):
        for each, optimizer in ((net, wrapped), (other, plain)):
            optimizer.zero_grad()
            loss_of(each, step, 0).backward()
            optimizer.step()
    yield from same(
        [p.detach() for p in net.parameters()], [p.detach() for p in other.parameters()]
    )


def optimizer_state(_: Any) -> Any:
    """All ranks get rank 0's state and settings, and no weight changes, also if only rank 0 has a
    state."""
    for has_state in (hvd.rank() == 0, True):
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1))
        if has_state:
            loss_of(net, hvd.rank(), hvd.rank()).backward()
            optimizer.step()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        yield from same([parameter.detach() for parameter in net.parameters()], list(before))
        other = model()
        expected = torch.optim.Adam(other.parameters(), lr=0.1)
        loss_of(other, 0, 0).backward()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == 0.1, optimizer.param_groups[0]["lr"]
        states = zip(
            optimizer.state_dict()["state"].values(),
            expected.state_dict()["state"].values(),
            strict=True,
        )
        for own, wanted in states:
            yield own["exp_avg"], (wanted["exp_avg"].numpy(), "float64")
            yield own["step"], (wanted["step"].numpy(), "float32")


def errors(_: Any) -> Any:
    net = model()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    if hvd.size() == 1:
        return
    loss_of(net, 0, 0).backward()
    for wrong in (wrapped.zero_grad, lambda: loss_of(net, 0, 0).backward()):
        try:
            wrong()
        except AssertionError as error:
            assert "optimizer.zero_grad() was called" in str(
                error
            ) or "more than backward_passes_per_step times" in str(error)
        else:
            raise RuntimeError(f"{wrong} passed")
    wrapped.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        wrapped.step()
    assert "without optimizer.skip_synchronize()" in str(seen[0].message)
    yield torch.ones(1), (torch.ones(1).numpy(), "float32")


def batch_norm(_: Any) -> Any:
    """Output, gradients and running statistics of uneven batches, against torch's batch norm of all
    samples in one process."""
    torch.manual_seed(4)
    rows = [3 + rank for rank in range(hvd.size())]
    whole = torch.randn(sum(rows), 2, 5, dtype=torch.float64)
    weights = torch.randn_like(whole)
    start = sum(rows[: hvd.rank()])
    end = sum(rows[: hvd.rank() + 1])
    layers = nn.BatchNorm1d(2).double(), hvd.SyncBatchNorm(2).double()
    inputs = whole.clone().requires_grad_(), whole[start:end].clone().requires_grad_()
    (layers[0](inputs[0]) * weights).sum().backward()
    found = layers[1](inputs[1])
    (found * weights[start:end]).sum().backward()
    reference = nn.functional.batch_norm(whole, None, None, layers[0].weight, layers[0].bias, True)
    yield found.detach(), (reference[start:end].detach().numpy(), "float64")
    yield inputs[1].grad, (inputs[0].grad[start:end].numpy(), "float64")  # type: ignore[index]
    yield (
        hvd.allreduce(layers[1].weight.grad, op=hvd.Sum),
        (layers[0].weight.grad.numpy(), "float64"),
    )  # type: ignore[union-attr]
    yield layers[1].running_var, (layers[0].running_var.numpy(), "float64")  # type: ignore[union-attr]
    yield layers[1].running_mean, (layers[0].running_mean.numpy(), "float64")  # type: ignore[union-attr]


def jax_arrays(_: Any) -> Any:
    """They go in and come out of the same calls."""
    import jax.numpy as jnp

    rank = hvd.rank()
    size = hvd.size()
    total = size * (size + 1) / 2
    for dtype in ("float32", "bfloat16", "int32"):
        x = jnp.full((3, 2), rank + 1, dtype)
        for found, expected in (
            (hvd.allreduce(x, op=hvd.Sum), np.full((3, 2), total)),
            (hvd.broadcast(x, size - 1), np.full((3, 2), size)),
            (hvd.allgather(x), np.repeat(np.arange(1.0, size + 1), 3)[:, None] * np.ones((1, 2))),
        ):
            assert type(found) is type(x) and found.dtype == x.dtype, (type(found), found.dtype)
            yield np.asarray(found, np.float64), (expected, "float64")
    try:
        hvd.allreduce_(x)
    except ValueError as error:
        assert "a JAX array cannot be changed in place" in str(error), error
    else:
        raise RuntimeError("a JAX array was changed")


def empty_step(_: Any) -> Any:
    """HVDTRAIN_HOROVOD_EMPTY_STEP=1: a fresh optimizer makes a step with gradients of 0 first, as
    Horovod's, wrapped or not."""
    for wraps in (False, True):
        net = model()
        by_hand = model()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        for variable in ("1", "2"):
            os.environ["HVDTRAIN_HOROVOD_EMPTY_STEP"] = variable
            try:
                # the second time there is a state, and no step
                hvd.broadcast_optimizer_state(optimizer, 0)
            except UserError as error:
                assert (
                    variable == "2"
                    and "HVDTRAIN_HOROVOD_EMPTY_STEP='2' is neither 0 nor 1" in str(error)
                )
            finally:
                del os.environ["HVDTRAIN_HOROVOD_EMPTY_STEP"]
        rule = torch.optim.AdamW(by_hand.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step, 0).backward()
            optimizer.step()
            if step == 0:
                for parameter in by_hand.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                rule.step()
            rule.zero_grad()
            loss_of(by_hand, step, 0).backward()
            rule.step()
        yield from same(
            [parameter.detach() for parameter in net.parameters()],
            [parameter.detach() for parameter in by_hand.parameters()],
        )


CHECKS = (
    *(
        empty_step,
        averages,
        sums,
        several_passes,
        predivided,
        grouped,
        clipped,
        of_a_set,
        by_closure,
        scheduled,
        scaled,
        compiled,
        by_lbfgs,
        unused_parameters,
        sparse_gradients,
    ),
    *(adasum_steps, optimizer_state, errors, batch_norm, jax_arrays),
)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    failures = {check.__name__: failure_of(hvd, check) for check in CHECKS}
    for rank, other in enumerate(hvd.allgather_object(failures)):
        for name, failure in other.items():
            failures[name] = failures[name] or (f"rank {rank}: {failure}" if failure else "")
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
