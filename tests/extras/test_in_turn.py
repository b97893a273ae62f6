"""Several models of a custom loop, each of which steps in its turn: equal to plain torch on 1, 2
and 3 ranks, in one checkpoint; and the text of each error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import in_turn_on_ranks
import numpy as np
import pytest
import torch
from pool import alone
from ranks import mpirun, needs_mpirun

import hvdtrain as ht
from hvdtrain.errors import UserError
from hvdtrain.extras.in_turn.models import ModelsInTurn

X = np.arange(40, dtype=np.float64).reshape(20, 2)
DATA = {"x": X, "y": X.sum(1)}
STEPS = 22  # of 3 epochs of 50 samples in batches of 7


@pytest.fixture
def opened() -> Iterator[list[ht.Context]]:
    """Contexts that a test opens; those that it leaves open are closed."""
    contexts: list[ht.Context] = []
    yield contexts
    for ctx in contexts:
        if not ctx._loop.is_closed:
            ctx.close()


def linear() -> Any:
    return torch.nn.Linear(2, 1).double()


def sgd(model: Any, lr: float = 1e-3) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.fixture
def make(opened: list[ht.Context]) -> Any:
    """Returns the context with two prepared models, a and b."""

    def init(*arguments: str, names: tuple[str, ...] = ("a", "b")) -> Any:
        ctx = ht.init(*arguments)
        opened.append(ctx)
        torch.manual_seed(3)
        nets = [linear() for _ in names]
        return (
            ctx,
            *(ctx.prepare(net, sgd(net), name=name) for net, name in zip(nets, names, strict=True)),
        )

    return init


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


def assert_is_plain(result: dict[str, Any], began: int = 0, steps: int = STEPS) -> None:
    assert result["difference"] <= 1e-12 and result["moved"] > 0.05, result
    assert (result["began"], result["steps"], len(result["losses"])) == (began, steps, steps)


@pytest.mark.parametrize(
    "way",
    ["gan sgd", "gan adam shard.stage=1", "actor_critic adam", "actor_critic sgd shard.stage=2"],
)
def test_one_process_is_plain_torch(way: str) -> None:
    result = in_turn_on_ranks.trained(way)
    assert_is_plain(result)
    if "stage" not in way:
        assert result["difference"] == 0.0


def on_ranks(size: int, folder: Path, epochs: float, mistake: str, *ways: str) -> Any:
    out = folder / f"of-{size}.json"
    words = [str(out), str(folder / "run"), f"{epochs}", mistake]
    return mpirun(size, alone("in_turn_on_ranks:main", *words, *ways)), out


@needs_mpirun
def test_ranks_are_plain_torch_and_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """2 ranks, then 3 with another shard.stage, then 1; the last start also has ranks that step in
    different orders."""
    mpi = "comm.engine=mpi"
    ways = [f"actor_critic adam {mpi}", f"gan sgd shard.stage=2 {mpi}", f"gan adam {mpi}"]
    done, out = on_ranks(2, tmp_path, 1, "", *ways)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    for result in results[:-1]:
        assert_is_plain(result)
    assert_is_plain(results[-1], steps=8)
    shutil.copytree(tmp_path / "run", tmp_path / "of-2")
    ways = [f"actor_critic adam shard.stage=1 {mpi}", f"gan sgd {mpi}"]
    done, out = on_ranks(3, tmp_path, 2, "order", *ways)
    results = json.loads(out.read_text())
    for result in results[:-1]:
        assert_is_plain(result)
    assert_is_plain(results[-1], began=8, steps=15)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert (
        "hvdtrain: ranks step in different orders (ranks 0, 2: step() of critic; rank 1: "
        "step() of actor)\n  where: optimizer.step()\n  fix: the same steps" in done.stderr
    ), done.stderr
    every = "checkpoint.every_steps=5 log.every_steps=5"
    result = in_turn_on_ranks.trained(f"actor_critic adam {every}", str(tmp_path / "run"), 3)
    assert_is_plain(result, began=15)
    straight = in_turn_on_ranks.trained(f"actor_critic adam {every}", str(tmp_path / "straight"), 3)
    for step, loss in straight["losses"].items():
        assert result["losses"][step] == pytest.approx(loss, rel=1e-11), step


def test_gradients_of_a_model_wait_for_its_step(make: Any) -> None:
    """a's step uses the sum of two backward passes; what the loss of b has given a is cleared."""
    ctx, (a, step_a), (b, step_b) = make("comm.engine=single")
    for batch in ctx.samples(DATA, batch=20):
        x = batch["x"]
        w, v = a.weight.detach().clone(), b.weight.detach().clone()
        bias = a.bias.detach().clone()
        ctx.backward(a(x).mean())
        both = a(x).mean() + (a(x) * b(x)).mean()
        ctx.backward(both, retain_graph=True)
        ctx.backward(both)
        step_a.zero_grad()  # of a alone
        ctx.backward(a(x).mean())
        ctx.backward(a(x).mean())
        with pytest.raises(
            UserError, match=r"not the mean over all ranks yet.*\n.*\n.*synchronize"
        ):
            torch.nn.utils.clip_grad_norm_(a.parameters(), 1.0)
        step_a.step()
        torch.testing.assert_close(a.weight.detach(), w - 2e-3 * x.mean(0), rtol=1e-12, atol=0)
        assert torch.equal(b.weight, v) and a.weight.grad is None and ctx.step == 1
        step_b.synchronize()
        gradient = b.weight.grad.clone()
        expected = 2 * (x * (x @ w.T + bias)).mean(0)  # of two passes through the first a
        torch.testing.assert_close(gradient[0], expected, rtol=1e-12, atol=0)
        torch.nn.utils.clip_grad_norm_(b.parameters(), 0.5)
        step_b.step()
        assert gradient.norm() > 1
        assert (b.weight.detach() - v).norm() <= 0.5e-3 and ctx.step == 1


def test_a_grad_scaler_of_each_model(make: Any) -> None:
    ctx, (a, step_a), (b, step_b) = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for batch in ctx.samples(DATA, batch=20):
        w = a.weight.detach().clone()
        gradient = torch.autograd.grad(loss_of(a, batch), a.weight)[0]
        ctx.backward(scaler.scale(loss_of(a, batch)))
        with pytest.raises(UserError, match="scaler.step"):
            scaler.step(step_a)
        step_a.synchronize()
        scaler.step(step_a)
        torch.testing.assert_close(a.weight.detach(), w - 1e-3 * gradient, rtol=1e-12, atol=0)
        v = b.weight.detach().clone()
        ctx.backward(scaler.scale(loss_of(b, batch)) * np.inf)
        step_b.synchronize()
        scaler.step(step_b)
        assert torch.equal(b.weight, v)
        scaler.update()
        assert scaler.get_scale() == 2.0**9


def test_a_step_that_is_not_finite_is_skipped_for_its_model_alone(make: Any) -> None:
    ctx, (a, step_a), (b, step_b) = make("guard.nonfinite=skip", "log.every_steps=1")
    for batch in ctx.samples(DATA, batch=10):
        w, v = a.weight.detach().clone(), b.weight.detach().clone()
        ctx.backward(loss_of(a, batch) * (np.nan if batch.step == 0 else 1))
        step_a.step()
        ctx.backward(loss_of(b, batch))
        step_b.step()
        assert torch.equal(a.weight, w) == (batch.step == 0) and not torch.equal(b.weight, v)


def test_a_model_without_an_optimizer_is_in_the_checkpoint(make: Any, tmp_path: Path) -> None:
    run = f"run={tmp_path / 'run'}"
    for epochs in (1, 2):
        ctx, (a, step_a), _ = make(run)
        teacher = linear()
        teacher.requires_grad_(requires_grad=False)
        if epochs == 2:
            torch.nn.init.zeros_(teacher.weight)
        teacher = ctx.prepare(teacher, name="teacher")
        assert isinstance(teacher, torch.nn.Linear)
        assert ctx.resume() == ({} if epochs == 1 else {"weight": weight})  # noqa: F821
        for batch in ctx.samples(DATA, batch=10, epochs=epochs):
            ctx.backward((a(batch["x"]) - teacher(batch["x"])).square().mean())
            step_a.step()
            weight = teacher.weight.tolist()
            ctx.checkpoint(weight=weight)
        ctx.close()
        assert teacher.weight.tolist() == weight != [[0, 0]]
    other, *_ = make(run, names=("a", "c"))
    with pytest.raises(UserError, match=r"the state has p.b.bias, but the models are a, c"):
        other.resume()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["shard.stage=3"], "shard.stage is not supported with several models"),
        (["comm.local_steps=5"], "comm.local_steps is not"),
        (["speed.precision=fp16"], r"(?s)speed.precision is not.*synchronize"),
        (["framework=jax"], r"framework=jax supports only one model"),
    ],
)
def test_settings_that_need_one_model(
    opened: list[ht.Context], arguments: list[str], what: str
) -> None:
    ctx = ht.init(*arguments)
    opened.append(ctx)
    net = linear()
    with pytest.raises(UserError, match=what):
        ctx.prepare(net, sgd(net), name="a")


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("comm.op", {"comm": {"op": "adasum"}}),
        ("comm.reduce", {"comm": {"reduce": "distributed_optimizer"}}),
        ("comm.reduce", {"comm": {"reduce": "ddp"}}),
        ("parallel.*", {"parallel": {"tensor": 2}}),
        ("parallel.*", {"parallel": {"pipeline": 2}}),
    ],
)
def test_settings_of_several_ranks_that_need_one_model(
    opened: list[ht.Context], key: str, section: dict[str, dict[str, Any]]
) -> None:
    ctx = ht.init()
    opened.append(ctx)
    ((name, values),) = section.items()
    config = ctx._loop.config
    config = config.replace(**{name: getattr(config, name).replace(**values)})
    with pytest.raises(UserError, match=f"{re.escape(key)} is not supported with several models"):
        ModelsInTurn(config, ctx.mesh, lambda: None)


def test_names(make: Any, opened: list[ht.Context]) -> None:
    ctx, (a, _), _ = make()
    with pytest.raises(UserError, match="there are two models with name='b'"):
        ctx.prepare(linear(), name="b")
    with pytest.raises(UserError, match=r"name='a.b' is not a name of letters"):
        ctx.prepare(linear(), name="a.b")
    with pytest.raises(UserError, match=r'(?s)prepare.. was called twice.*name="generator"'):
        ctx.prepare(a, sgd(a))
    next(iter(ctx.samples(DATA, batch=5)))
    with pytest.raises(UserError, match="was called after the loop has begun"):
        ctx.prepare(linear(), name="late")


def test_a_wrong_name_can_be_corrected(opened: list[ht.Context]) -> None:
    """In a notebook; also by a model without a name."""
    for name in ("a", None):
        ctx = ht.init()
        opened.append(ctx)
        net = linear()
        with pytest.raises(UserError, match="name='a b' is not a name of letters"):
            ctx.prepare(net, sgd(net), name="a b")
        ctx.prepare(net, sgd(net), name=name)
        ctx.close()


def test_an_optimizer_that_cannot_step(make: Any, tmp_path: Path) -> None:
    ctx, (a, step_a), (b, step_b) = make(f"run={tmp_path / 'run'}")
    with pytest.raises(UserError, match="outside of a loop"):
        step_a.step()
    ctx.resume()
    for batch in ctx.samples(DATA, batch=5):
        if batch.step == 0:
            with pytest.raises(UserError, match=r"no ctx.backward\(loss\) has reached a since"):
                step_a.step()
            loss_of(a, batch).backward()
            with pytest.raises(UserError, match=r"instead of loss.backward\(\)"):
                step_a.step()
            step_a.zero_grad()
        else:
            with pytest.raises(
                UserError, match="the gradients of b have parts of an earlier batch"
            ):
                step_b.step()
            b.zero_grad()
        ctx.backward(loss_of(a, batch) + b(batch["x"]).mean())
        step_a.synchronize()
        with pytest.raises(UserError, match=r"between optimizer.synchronize\(\) and"):
            ctx.backward(loss_of(a, batch))
        step_a.step()
        if batch.step == 1:
            step_b.step()
            with pytest.raises(UserError, match="is not one that ctx.prepare"):
                ctx.checkpoint(linear(), step_b)
            ctx.checkpoint(b, step_b, now=True)
            with pytest.raises(UserError, match="a step after ctx.checkpoint"):
                step_a.step()
            break


def test_synchronized_gradients_do_not_outlive_their_batch(make: Any) -> None:
    ctx, (a, step_a), (b, step_b) = make()
    for batch in ctx.samples(DATA, batch=10):
        if batch.step == 0:
            ctx.backward(loss_of(a, batch) + loss_of(b, batch))
            step_a.synchronize()
            step_b.step()
            continue
        with pytest.raises(UserError, match="the gradients of a have parts of an earlier batch"):
            step_a.step()
        a.zero_grad()
        with pytest.raises(UserError, match=r"no ctx.backward\(loss\) has reached a since"):
            step_a.step()
        w = a.weight.detach().clone()
        gradient = torch.autograd.grad(loss_of(a, batch), a.weight)[0]
        ctx.backward(loss_of(a, batch))
        step_a.step()
        torch.testing.assert_close(a.weight.detach(), w - 1e-3 * gradient, rtol=1e-12, atol=0)


def test_two_models_do_not_train_one_parameter(make: Any) -> None:
    ctx, (a, _), _ = make()
    both = torch.nn.Sequential(a, torch.nn.Linear(1, 1).double())
    with pytest.raises(UserError, match=r"a and c both train weight of a, but the step of one"):
        ctx.prepare(both, sgd(both), name="c")


def test_counts_of_items_weight_each_backward_pass(make: Any) -> None:
    ctx, (a, step_a), _ = make()
    for batch in ctx.samples(DATA, batch=20):
        w = a.weight.detach().clone()
        rows = a(batch["x"])[:5]
        ctx.backward(rows.mean(), count=5)
        with pytest.raises(UserError, match="earlier steps have a count"):
            ctx.backward(rows.mean())
        with pytest.raises(UserError, match=r"count, which is not supported with several models"):
            ctx.accumulate(lambda part: (a(part["x"]).mean(), 3), at_most=10)
        step_a.zero_grad()
        ctx.backward(a(batch["x"])[:5].mean(), count=5)
        step_a.step()
        gradient = batch["x"][:5].mean(0)
        torch.testing.assert_close(a.weight.detach(), w - 1e-3 * gradient, rtol=1e-12, atol=0)


def test_parts_of_a_batch_add_to_the_gradients(make: Any) -> None:
    """Uneven parts of 20 samples; the mean over them is that of one backward pass."""
    ctx, (a, step_a), _ = make()
    for batch in ctx.samples(DATA, batch=20):
        w = a.weight.detach().clone()
        gradient = torch.autograd.grad(loss_of(a, batch), a.weight)[0]
        ctx.backward(loss_of(a, batch))
        expected = loss_of(a, batch).item()
        loss = ctx.accumulate(lambda part: loss_of(a, part), at_most=6)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        step_a.step()
        torch.testing.assert_close(a.weight.detach(), w - 2e-3 * gradient, rtol=1e-12, atol=0)


def test_one_model_without_a_name_has_one_backward_pass(opened: list[ht.Context]) -> None:
    ctx = ht.init()
    opened.append(ctx)
    net = linear()
    model, optimizer = ctx.prepare(net, sgd(net))
    for batch in ctx.samples(DATA, batch=20):
        with pytest.raises(UserError, match=r"(?s)retain_graph=True for a second.*name="):
            ctx.backward(loss_of(model, batch), retain_graph=True)
        ctx.backward(loss_of(model, batch))
        optimizer.step()
