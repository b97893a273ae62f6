"""Each call of a Context on one process, by hand: samples, backward, mean, log, checkpoint, resume,
stops; and the text of each error."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import signal
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import HIGHEST_STAGE, needs_extra

import hvdtrain as ht
from hvdtrain.context.logged import Logged, quotient
from hvdtrain.errors import Diverged, UserError
from hvdtrain.frameworks.torch.user_loop.counted import check_mean_over_samples
from hvdtrain.frameworks.torch.user_loop.extra import from_arrays, to_arrays

X = np.arange(40, dtype=np.float64).reshape(20, 2)
DATA = {"x": X, "y": X.sum(1)}


@pytest.fixture
def opened() -> Iterator[list[ht.Context]]:
    """Contexts that a test opens; those that it leaves open are closed."""
    contexts: list[ht.Context] = []
    yield contexts
    for ctx in contexts:
        if not ctx._loop.is_closed:
            ctx.close()


@pytest.fixture
def make(opened: list[ht.Context]) -> Any:
    def init(*arguments: str, prepared: bool = True, **options: Any) -> Any:
        ctx = ht.init(*arguments)
        opened.append(ctx)
        torch.manual_seed(3)
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), **{"lr": 1e-3, **options})
        return (ctx, *(ctx.prepare(model, optimizer) if prepared else (model, optimizer)))

    return init


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def test_what_a_context_is(make: Any, tmp_path: Path) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}")
    assert (ctx.rank, ctx.size, ctx.local_rank, ctx.local_size, ctx.step, ctx.run) == (
        0,
        1,
        0,
        1,
        0,
        tmp_path / "run",
    )
    assert ctx.mesh.world.size == 1 and str(ctx.device) == "cpu"
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.param_groups[0]["lr"] == 1e-3
    assert set(optimizer.state_dict()["param_groups"][0]) == set(
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).param_groups[0]
    )
    assert "prepared SGD" in repr(optimizer) and model.weight.dtype == torch.float64
    with pytest.raises(UserError, match="a context is already open"):
        ht.init()
    assert ctx.close() == 0 == ctx.close()
    with pytest.raises(UserError, match="the context is closed"):
        ctx.backward(torch.zeros(()))


def test_a_closed_context_ends_no_process(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """torch.distributed keeps the hook of an open context within its own, and C code may print an
    exception with it at any time."""
    ctx, _, _ = make()
    hook = sys.excepthook
    ctx.close()
    hook(ValueError, ValueError("printed later"), None)
    assert "ValueError: printed later" in capsys.readouterr().err and sys.excepthook is not hook


def test_samples_are_each_read_once_in_an_epoch_and_steps_are_plain_sgd(make: Any) -> None:
    ctx, model, optimizer = make()
    weight = model.weight.detach().clone()
    bias = model.bias.detach().clone()
    seen = []
    for number, batch in enumerate(ctx.samples(DATA, batch=6, epochs=2, seed=5)):
        x, y = batch
        assert x is batch["x"] and (batch.count, batch.step, batch.epoch) == (
            6,
            number,
            6 * number // 20,
        )
        assert batch.ends_epoch == (number in (3, 6))
        seen += x[:, 0].tolist()
        expected = 2 * (x @ weight.T + bias - y[:, None])
        weight = weight - 1e-3 * (expected.T @ x) / 6
        bias = bias - 1e-3 * expected.mean(0)
        ctx.backward(loss_of(model, batch))
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.bias.detach(), bias, rtol=1e-12, atol=1e-12)
        assert model.weight.grad is None
    assert sorted(seen[:20]) == X[:, 0].tolist() == sorted(seen[20:40]) and seen[:20] != seen[20:40]
    assert (len(seen), ctx.step, ctx.epochs) == (42, 7, 2.1)


@needs_extra("trackers")
def test_what_is_logged_is_the_mean_over_samples_between_sync_points(
    make: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ctx, model, optimizer = make(f"run={run}", "log.every_steps=2", "log.trackers=[tensorboard]")
    values = []
    for batch in ctx.samples(DATA, batch=4, epochs=0.8):
        loss = loss_of(model, batch)
        ctx.backward(loss)
        optimizer.step()
        values.append(loss.item())
        ctx.log(loss=loss, first=float(batch.step))
        if batch.step == 2:
            ctx.log(only_here=7)
    ctx.close()
    found = events(run, "step")
    assert [event["step"] for event in found] == [2, 4]
    assert [event["loss"] for event in found] == pytest.approx(
        [sum(values[:2]) / 2, sum(values[2:]) / 2], rel=1e-12
    )
    assert [event["logged"]["first"] for event in found] == [0.5, 2.5] and found[1]["logged"][
        "only_here"
    ] == 7
    assert [event["samples_per_s"] > 0 for event in found] == [True, True] and found[1][
        "lr"
    ] == 1e-3
    (start,), (end,) = events(run, "start"), events(run, "end")
    assert (start["samples"], start["ranks"], end["epochs"], end["exit_code"]) == (20, 1, 0.8, 0)
    frame = ht.read(run)
    assert frame["logged.first"].tolist() == [0.5, 2.5]
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard" / "run"))
    reader.Reload()
    # of steps two seconds apart
    assert {"train/first", "Loss/train", "job/epochs"} <= set(reader.Tags()["scalars"])
    assert [(s.step, s.value) for s in reader.Scalars("train/first")] == [(2, 0.5)]
    assert [s.value for s in reader.Scalars("Loss/train")] == pytest.approx(
        [sum(values[:2]) / 2], rel=1e-6
    )


def test_an_event_and_a_line_for_each_epoch(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 samples in batches of 8: epochs end within the batches of steps 3 and 5, and the third
    does not end."""
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}", "log.every_steps=2", "log.every_s=0")
    for batch in ctx.samples(DATA, batch=8, epochs=2.4):
        plain_step(ctx, model, optimizer, batch)
        ctx.log(loss=float(batch.step), lr=0.5 if batch.step < 3 else 0.25)
        if batch.ends_epoch:
            ctx.log(val_loss=10.0 + batch.epoch)
    ctx.close()
    first, second = events(tmp_path / "run", "epoch")
    assert [
        (e["epoch"], e["step"], e["train_loss"], e["val_loss"], e["lr"]) for e in (first, second)
    ] == [
        (1, 3, 1.0, 10.0, 0.5),
        (2, 5, 3.5, 11.0, 0.25),
    ]
    assert (
        first["logged"] == {"loss": 1.0, "val_loss": 10.0}
        and first["epochs"] == 1.2
        and first["samples_per_s"] > 0
    )
    steps = events(tmp_path / "run", "step")
    assert [(e["step"], e["lr"], e["logged"]["loss"]) for e in steps] == [
        (2, 0.5, 0.5),
        (4, 0.375, 2.5),
        (6, 0.25, 4.5),
    ]
    assert all("lr" not in e["logged"] for e in (*steps, first, second))
    lines = capsys.readouterr().out.splitlines()
    of_epochs = [line for line in lines if line.startswith("epoch ")]
    assert [re.sub(r"[\d.]+ samples/s|[\d.]+ s$", "~", line) for line in of_epochs] == [
        "epoch 1: loss 1, val_loss 10, ~, lr 0.5, ~",
        "epoch 2: loss 3.5, val_loss 11, ~, lr 0.25, ~",
    ]
    assert [line.count("lr ") for line in lines if line.startswith("  step ")] == [1, 1, 1]


def test_means_and_an_evaluation(make: Any) -> None:
    ctx, _, _ = make()
    assert ctx.mean({"a": 3, "b": torch.tensor(2.5)}) == {"a": 3.0, "b": 2.5}
    assert math.isnan(ctx.mean({"a": 3}, count=0)["a"])
    with torch.no_grad():
        rows = [(batch["x"][:, 0].tolist(), batch.count) for batch in ctx.each(DATA, batch=8)]
    assert [count for _, count in rows] == [8, 8, 4] and [
        value for row, _ in rows for value in row
    ] == X[:, 0].tolist()


def test_a_checkpoint_brings_back_everything(
    make: Any, tmp_path: Path, opened: list[ht.Context]
) -> None:
    """The optimizer's momentum and a changed rate, a scheduler, tensors, and the place in the
    samples: as if nothing had happened."""
    arguments = (f"run={tmp_path / 'run'}", "checkpoint.every_steps=3", "log.every_steps=1")

    def train(until: int, epochs: float) -> tuple[dict[str, Any], Any, list[list[float]]]:
        ctx, model, optimizer = make(*arguments, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        state = ctx.resume()
        if state:
            scheduler.load_state_dict(state["scheduler"])
        seen = []
        for batch in ctx.samples(DATA, batch=6, epochs=epochs):
            seen.append(batch["x"][:, 0].tolist())
            ctx.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            extra = {
                "half": torch.ones(2, dtype=torch.bfloat16),
                "rows": np.arange(3),
                "nested": {1: [None, ("a", 0.1)], "deep": {"x": True}},
            }
            written = ctx.checkpoint(model, optimizer, scheduler=scheduler, step=ctx.step, **extra)
            assert written == (ctx.step % 3 == 0 or ctx.step == 7)
            if ctx.step == until:
                break
        ctx.close()
        return (
            state,
            (model.weight.detach().clone(), optimizer.param_groups[0]["lr"], ctx.step),
            seen,
        )

    none, first, seen = train(5, 2)
    assert none == {} and first[2] == 5
    state, resumed, more = train(99, 2)
    assert (state["step"], state["scheduler"]["last_epoch"], state["rows"].tolist()) == (
        3,
        3,
        [0, 1, 2],
    )
    assert state["nested"] == {1: [None, ("a", 0.1)], "deep": {"x": True}}
    assert state["half"].dtype == torch.bfloat16 and state["half"].tolist() == [1, 1]
    (tmp_path / "run").rename(tmp_path / "other")
    _, straight, all_seen = train(99, 2)
    assert torch.equal(straight[0], resumed[0]) and straight[1:] == resumed[1:] == (1e-3 / 8, 7)
    assert seen[:3] + more == all_seen
    state, over, nothing = train(99, 2)
    assert (
        over[2] == 7 and nothing == [] and state["step"] == 7 and torch.equal(over[0], straight[0])
    )
    _, longer, more = train(99, 2.5)  # a complete loop resumes if it gets more epochs
    assert len(more) == 2 and longer[2] == 9


def test_a_signal_stops_at_the_next_sync_point_with_a_checkpoint(make: Any, tmp_path: Path) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}", "log.every_steps=4")
    stops = []
    for batch in ctx.samples(DATA, batch=2, epochs=5):
        ctx.backward(loss_of(model, batch))
        optimizer.step()
        if batch.step == 4:
            signal.raise_signal(signal.SIGUSR2)
        written = ctx.checkpoint(model, optimizer)
        stops.append((written, ctx.should_stop))
    assert stops == [(False, False)] * 7 + [(True, True)] and ctx.step == 8
    assert ctx.close() == 75
    assert events(tmp_path / "run", "stop")[0]["reason"] == "SIGUSR2"
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


@pytest.mark.parametrize("kept", ["nothing", "an object", "a value", "no call"])
def test_a_stop_without_a_call_of_checkpoint_writes_what_can_be_resumed_or_says_that_there_is_nothing(  # noqa: E501
    make: Any, tmp_path: Path, kept: str
) -> None:
    """The script calls it at the end of an epoch alone."""
    run = tmp_path / "run"
    steps = []
    for turn in range(2):
        ctx, model, optimizer = make(f"run={run}", "log.every_steps=4", "resume=auto")
        extra: dict[str, Any] = {
            "an object": {"other": torch.nn.Linear(1, 1)},
            "a value": {"best": 1},
        }.get(kept, {})
        ctx.resume()
        for batch in ctx.samples(DATA, batch=2, epochs=2):
            plain_step(ctx, model, optimizer, batch)
            steps.append(batch.step)
            if batch.step == (14 if kept != "no call" else 5) and turn == 0:
                signal.raise_signal(signal.SIGUSR2)
            if batch.ends_epoch:
                ctx.checkpoint(model, optimizer, now=True, **extra)
        assert ctx.close() == (75 if turn == 0 else 0)
    (stop,) = events(run, "stop")
    if kept == "a value":  # resumes from the end of the first epoch
        assert steps == [*range(16), *range(10, 20)]
        assert (
            "no checkpoint of step 16: it keeps best, which only the script knows"
            in stop["lines"][1]
        )
    elif kept == "no call":  # in the first epoch
        assert steps == [*range(8), *range(20)]
        assert "ctx.checkpoint() was not called" in stop["lines"][1] and stop["lines"][1].endswith(
            "there is no older one"
        )
    else:
        assert steps == list(range(20)) and len(stop["lines"]) == 2


def test_a_time_limit_stops_it_to_be_resumed_where_it_was(make: Any, tmp_path: Path) -> None:
    """guard.max_time counts from the start of the process: 1 s is long over."""
    steps = []
    for limit in ("1s", "1h"):
        ctx, model, optimizer = make(
            f"run={tmp_path / 'run'}", "log.every_steps=4", f"guard.max_time={limit}"
        )
        ctx.resume()
        for batch in ctx.samples(DATA, batch=2, epochs=1):
            plain_step(ctx, model, optimizer, batch)
            ctx.checkpoint(model, optimizer)
            steps.append(batch.step)
        assert ctx.close() == (75 if limit == "1s" else 0)
    assert steps == list(range(10))
    assert [event["reason"] for event in events(tmp_path / "run", "stop")] == ["guard.max_time=1s"]


def test_an_error_of_the_script_is_the_last_event(make: Any, tmp_path: Path) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="mine"), ctx:
        for batch in ctx.samples(DATA, batch=5, epochs=1):
            plain_step(ctx, model, optimizer, batch)
            if batch.step == 1:
                raise ValueError("mine")
    (failed,) = events(tmp_path / "run", "failed")
    assert (failed["step"], failed["reason"], failed["exit_code"]) == (2, "ValueError: mine", 1)


def test_now_and_without_a_run_folder(make: Any, tmp_path: Path) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}")
    for batch in ctx.samples(DATA, batch=5, epochs=1):
        ctx.backward(loss_of(model, batch))
        optimizer.step()
        assert ctx.checkpoint(model, optimizer, now=batch.step == 1) == (batch.step in (1, 3))
    ctx.close()
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_that_the_script_asked_for_is_kept(make: Any, tmp_path: Path) -> None:
    """Of steps 1 and 3, the second one written twice: as it is due, then as it is asked for."""
    words = (
        f"run={tmp_path / 'run'}",
        "checkpoint.keep_last=1",
        "checkpoint.every_steps=1",
        "log.every_steps=1",
    )
    for epochs, kept in ((1, [1, 3, 4]), (2, [1, 3, 8])):
        ctx, model, optimizer = make(*words)
        ctx.resume()
        for batch in ctx.samples(DATA, batch=5, epochs=epochs):
            plain_step(ctx, model, optimizer, batch)
            if batch.step == 2:
                assert ctx.checkpoint(model, optimizer)
            assert ctx.checkpoint(model, optimizer, now=batch.step in (0, 2)) or batch.step == 2
        ctx.close()
        assert steps_of(tmp_path / "run") == kept
    one = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-00000008" / "progress.json").read_text()
    )
    assert one["train_state"]["is_kept"] is False, (
        "a script that resumes from a kept checkpoint does not keep its own"
    )


@pytest.mark.parametrize(("better", "best"), [("min", 2), ("max", 3)])
def test_the_best_checkpoints_by_the_objective_that_the_script_gives(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], better: str, best: int
) -> None:
    ctx, model, optimizer = make(
        f"run={tmp_path / 'run'}", "checkpoint.keep_last=1", "checkpoint.keep_best=1"
    )
    ctx.resume()
    for batch, value in zip(
        ctx.samples(DATA, batch=5, epochs=1.5),
        (3.0, torch.tensor(1.0), 7.0, math.inf, 2.0, None),
        strict=True,
    ):
        plain_step(ctx, model, optimizer, batch)
        ctx.checkpoint(model, optimizer, objective=value, better=better)
    ctx.close()
    assert steps_of(tmp_path / "run") == [best, 6]
    assert f"best objective {[1, 7][best == 3]}, in epoch 1" in capsys.readouterr().out
    (end,) = events(tmp_path / "run", "end")
    assert (end["best_objective"], end["best_epoch"]) == ([1.0, 7.0][best == 3], 1)
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}")
    ctx.resume()
    batch = next(ctx.samples(DATA, batch=5, epochs=2))
    plain_step(ctx, model, optimizer, batch)
    other = "max" if better == "min" else "min"
    with pytest.raises(
        UserError, match=f"better={other}, but earlier evaluations had better={better}"
    ):
        ctx.checkpoint(model, optimizer, objective=1.0, better=other)
    with pytest.raises(UserError, match="objective is a str, not a number"):
        ctx.checkpoint(model, optimizer, objective="good", better=better)
    with pytest.raises(UserError, match="better='most'"):
        ctx.checkpoint(model, optimizer, objective=1.0, better="most")


def test_best_checkpoints_that_no_call_gives_an_objective_for_are_told(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}", "checkpoint.keep_best=2")
    for batch in ctx.samples(DATA, batch=10):
        plain_step(ctx, model, optimizer, batch)
        ctx.checkpoint(model, optimizer)
    ctx.close()
    assert (
        "checkpoint.keep_best=2 has kept none: no call was ctx.checkpoint(..., objective=value)"
        in capsys.readouterr().out
    )


def test_what_no_checkpoint_holds_is_refused_at_the_first_step(make: Any, tmp_path: Path) -> None:
    ctx, model, optimizer = make(f"run={tmp_path / 'run'}")
    batch = next(ctx.samples(DATA, batch=2))
    with pytest.raises(UserError, match="the step of this batch has not been made yet"):
        ctx.checkpoint(model, optimizer)
    ctx.backward(loss_of(model, batch))
    optimizer.step()
    with pytest.raises(UserError, match="extra.rows is a range, which a checkpoint cannot store"):
        ctx.checkpoint(model, optimizer, rows=range(3))


def test_numbers_that_are_not_finite(make: Any, tmp_path: Path) -> None:
    def step(ctx: Any, model: Any, optimizer: Any, at: int) -> None:
        for batch in ctx.samples(DATA, batch=5, epochs=1):
            ctx.backward(loss_of(model, batch) * (math.nan if batch.step == at else 1.0))
            optimizer.step()
            assert not ctx.should_stop

    ctx, model, optimizer = make("log.every_steps=1")
    with pytest.raises(
        Diverged, match="1 of the steps up to 2 had a loss or gradient that is not finite"
    ):
        step(ctx, model, optimizer, 1)
    ctx.close()
    ctx, model, optimizer = make(
        "guard.nonfinite=skip", "log.every_steps=1", f"run={tmp_path / 'run'}"
    )
    step(ctx, model, optimizer, 2)
    assert model.weight.isfinite().all()
    ctx.close()
    assert [(event["step"], event["count"]) for event in events(tmp_path / "run", "nonfinite")] == [
        (3, 1)
    ]


def test_gradients_are_clipped_and_a_closure_is_called_once(make: Any) -> None:
    ctx, model, optimizer = make("optim.clip_norm=0.5", lr=1.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    calls = []
    for batch in ctx.samples(DATA, batch=20, epochs=1):

        def closure(batch: Any = batch) -> torch.Tensor:
            calls.append(batch.step)
            loss = loss_of(model, batch)
            ctx.backward(loss)
            return loss

        assert optimizer.step(closure).requires_grad
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert calls == [0] and moved.norm().item() == pytest.approx(0.5, rel=1e-6)


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def stepped(
    make: Any, work: Any, *arguments: str, wrap: Any = lambda model: model, **options: Any
) -> torch.Tensor:
    """The weights after an epoch of work(ctx, model, optimizer, batch)."""
    ctx, model, optimizer = make(*arguments, **options)
    model = wrap(model)
    for batch in ctx.samples(DATA, batch=7, epochs=1):
        work(ctx, model, optimizer, batch)
    ctx.close()
    return weights_of(model)


def plain_step(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
    ctx.backward(loss_of(model, batch))
    optimizer.step()


def test_two_models_in_one_module_each_with_its_own_loss(opened: list[ht.Context]) -> None:
    """As docs/own-loop.md has it of a GAN: one step of both, where the second loss goes through the
    first model without training it."""
    torch.manual_seed(5)
    net = torch.nn.ModuleDict({"g": torch.nn.Linear(2, 2), "d": torch.nn.Linear(2, 1)}).double()
    plain = copy.deepcopy(net)
    ctx = ht.init()
    opened.append(ctx)
    rates = {"g": 1e-3, "d": 2e-3}
    _, optimizer = ctx.prepare(
        net,
        torch.optim.SGD(
            [{"params": list(net[n].parameters()), "lr": lr} for n, lr in rates.items()]
        ),
    )
    x, _ = batch = next(ctx.samples(DATA, batch=7))
    fixed = {name: p.detach() for name, p in net["d"].named_parameters()}
    loss_of_d = (net["d"](x).square() - net["d"](net["g"](x).detach())).mean()
    loss_of_g = torch.func.functional_call(net["d"], fixed, (net["g"](x),)).square().mean()
    ctx.backward(loss_of_d + loss_of_g)
    optimizer.step()
    assert batch.count == 7
    losses = {
        "d": (plain["d"](x).square() - plain["d"](plain["g"](x))).mean(),
        "g": plain["d"](plain["g"](x)).square().mean(),
    }
    for name, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(plain[name].parameters()), retain_graph=True)
        for p, before, gradient in zip(
            net[name].parameters(), plain[name].parameters(), gradients, strict=True
        ):
            torch.testing.assert_close(
                p.detach(), before.detach() - rates[name] * gradient, rtol=1e-12, atol=1e-12
            )


def test_parts_of_a_batch_make_its_step(make: Any) -> None:
    parts = []

    def in_parts(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        def loss_of_part(part: Any) -> torch.Tensor:
            parts.append((len(part["x"]), part.count, part.step))
            return loss_of(model, part)

        expected = loss_of(model, batch).item()
        assert ctx.accumulate(loss_of_part, at_most=3).item() == pytest.approx(expected, rel=1e-12)
        optimizer.step()

    found = stepped(make, in_parts)
    assert parts == [(size, size, step) for step in range(3) for size in (2, 2, 3)]
    torch.testing.assert_close(found, stepped(make, plain_step), rtol=1e-12, atol=1e-12)


STAGES = [1, pytest.param(3, marks=needs_extra("fully_sharded"))]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_clipped_by_the_key_or_by_torch(make: Any, stage: int) -> None:
    def clipped(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        ctx.backward(loss_of(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    found = stepped(make, clipped, lr=0.1)
    torch.testing.assert_close(
        found, stepped(make, plain_step, "optim.clip_norm=0.5", lr=0.1), rtol=1e-6, atol=0
    )
    with pytest.raises(
        UserError,
        match="with shard.stage or parallel.*, each rank has only a part of the gradients, and "
        "p.grad is not available\n.*\n.*optim.clip_norm=1",
    ):
        stepped(make, clipped, f"shard.stage={stage}")


def test_a_grad_scaler(make: Any, tmp_path: Path) -> None:
    """Powers of two change nothing; a step that overflows is left out and halves the scale, which
    checkpoints keep."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def scaled(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        ctx.backward(scaler.scale(loss_of(model, batch)))
        scaler.step(optimizer)
        scaler.update()

    assert torch.equal(stepped(make, scaled), stepped(make, plain_step))
    run = f"run={tmp_path / 'run'}"
    ctx, model, optimizer = make(run, "log.every_steps=1")
    for batch in ctx.samples(DATA, batch=20, epochs=2):
        before = weights_of(model)
        ctx.backward(scaler.scale(loss_of(model, batch) * (math.inf if batch.step == 0 else 1)))
        scaler.step(optimizer)
        scaler.update()
        assert (
            torch.equal(weights_of(model), before) == (batch.step == 0)
            and scaler.get_scale() == 2.0**9
        )
        ctx.checkpoint(model, optimizer, scaler=scaler)
    ctx.close()
    ctx, model, optimizer = make(run, "log.every_steps=1", "guard.nonfinite=stop")
    endless = torch.amp.GradScaler("cpu")
    endless.load_state_dict(ctx.resume()["scaler"])
    assert endless.get_scale() == 2.0**9
    with pytest.raises(
        Diverged, match="1 of the steps up to 33 had a loss or gradient that is not finite"
    ):
        for batch in ctx.samples(DATA, batch=1, epochs=9):
            ctx.backward(endless.scale(loss_of(model, batch) * math.nan))
            endless.step(optimizer)
            endless.update()
    ctx.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_grad_scaler_with_gradients_in_parts(make: Any, stage: int) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        ctx.backward(scaler.scale(loss_of(model, batch)))
        scaler.step(optimizer)

    with pytest.raises(UserError, match="a GradScaler only sees this rank's part of the gradients"):
        stepped(make, scaled, f"shard.stage={stage}")


def of_one_number() -> torch.nn.Module:
    net = torch.nn.Linear(2, 1).double()
    net.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    return net


def of_two_types() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 1))


@needs_extra("fully_sharded")
@pytest.mark.parametrize(
    ("net", "what"),
    [
        (
            lambda: torch.compile(torch.nn.Linear(2, 1), backend="eager"),
            "a compiled model would keep whole weights",
        ),
        (
            of_two_types,
            "the model's parameters are of torch.float32, torch.float64, but shard.stage=3 only "
            "supports one type",
        ),
        (
            of_one_number,
            "the parameter scale is a single number: shard.stage=3 gives each rank rows of each "
            "parameter",
        ),
    ],
)
def test_a_model_that_stage_3_cannot_cut(opened: list[ht.Context], net: Any, what: str) -> None:
    opened.append(ht.init("shard.stage=3"))
    model = net()
    with pytest.raises(UserError, match=what):
        opened[0].prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Tower(torch.nn.Module):
    """Layers that stage 3 gathers one at a time, and one weight that two parts share."""

    blocks = property(lambda self: self.layers)

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 4)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)]
        )
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight = torch.nn.Parameter(torch.rand(4, 2))
        self.frozen = torch.nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + layer(x) * self.frozen
        return x @ self.last.weight


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_a_model_of_blocks_that_stage_3_gathers_one_at_a_time(
    opened: list[ht.Context], tmp_path: Path, kind: str
) -> None:
    """Two parameter groups, a frozen weight, a shared one, batch norm, a resume and an evaluation;
    equal to the loop without stage 3."""

    def train(epochs: int, run: str, *arguments: str) -> list[float]:
        ctx = ht.init(f"run={run}", "log.every_steps=1", *arguments)
        opened.append(ctx)
        torch.manual_seed(0)
        net = Tower().double()
        rest = [
            p for name, p in net.named_parameters() if name.startswith("layers") and p.requires_grad
        ]
        groups = [
            {"params": [net.first.weight, net.first.bias, net.last.bias]},
            {"params": rest, "lr": 3e-3},
        ]
        model, optimizer = ctx.prepare(net, getattr(torch.optim, kind)(groups, lr=1e-3))
        ctx.resume()
        for batch in ctx.samples(DATA, batch=8, epochs=epochs):
            ctx.backward(model(batch["x"] / 40).pow(2).sum(1).mean())
            optimizer.step()
            ctx.checkpoint(model, optimizer)
        model.eval()
        with torch.no_grad():
            found = [model(batch["x"] / 40).sum().item() for batch in ctx.each(DATA, batch=10)]
        ctx.close()
        return found

    expected = train(4, f"{tmp_path / 'plain'}")
    assert train(4, f"{tmp_path / 'cut'}", HIGHEST_STAGE) == pytest.approx(expected, rel=1e-12)
    train(2, f"{tmp_path / 'resumed'}", HIGHEST_STAGE)
    assert train(4, f"{tmp_path / 'resumed'}") == pytest.approx(expected, rel=1e-12), (
        "stage 3, and on without"
    )
    start = events(tmp_path / "cut", "start")[0]
    assert start["model"].startswith("Tower, ")
    if HIGHEST_STAGE == "shard.stage=3":
        assert "in 3 blocks and the rest (ZeRO stage 3)" in start["model"]


@pytest.mark.parametrize("key", [(), ("speed.precision=bf16",)])
def test_a_prepared_model_is_copied_averaged_and_saved(
    opened: list[ht.Context], key: tuple[str, ...]
) -> None:
    """Within a step, whose gate the copies do not have; they compute as the model does."""
    opened.append(ctx := ht.init(*key))
    net = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in ctx.samples({"x": X.astype(np.float32)}, batch=20, epochs=1):
        loss = model(batch["x"]).mean()
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        copies = [loaded, copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module]
        ctx.backward(loss, count=0)  # which closes the gate of the model
        for one in copies:
            assert torch.equal(one(batch["x"]), model(batch["x"]))
            one(batch["x"]).mean().backward()
            assert one.bias.grad.item() == pytest.approx(1, rel=1e-2)
        optimizer.step()


class WithScale(torch.nn.Linear):
    """Gives a parameter beside what it computes."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.bias


def test_a_parameter_among_the_outputs_has_no_gradient_in_a_step_without_items_alone(
    opened: list[ht.Context],
) -> None:
    opened.append(ctx := ht.init())
    net = WithScale(2, 1, dtype=torch.float64)
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in ctx.samples(DATA, batch=5, epochs=1):
        outputs, scale = model(batch["x"])
        is_empty = batch.step == 1
        ctx.backward(
            (outputs.mean() + 2 * scale.sum()) * (math.nan if is_empty else 1),
            count=int(not is_empty),
        )
        assert net.bias.grad is not None and net.bias.grad.item() == (0 if is_empty else 3)
        assert not net.bias._backward_hooks
        optimizer.step()
        model(batch["x"])  # without a backward pass


def test_torch_compile_before_and_after_prepare(make: Any, tmp_path: Path) -> None:
    """A checkpoint has the names of the module inside, so it does not matter which run was
    compiled, and when."""

    def train(epochs: int, before: bool, after: bool, run: str) -> torch.Tensor:
        ctx, model, optimizer = make(run, prepared=False)
        model, optimizer = ctx.prepare(
            torch.compile(model, backend="eager") if before else model, optimizer
        )
        ctx.resume()
        model = torch.compile(model, backend="eager") if after else model
        for batch in ctx.samples(DATA, batch=20, epochs=epochs):
            plain_step(ctx, model, optimizer, batch)
            assert ctx.checkpoint(model, optimizer) == (ctx.step == epochs)
        ctx.close()
        return weights_of(model)

    straight = train(3, False, False, f"run={tmp_path / 'straight'}")
    for epochs, before, after in [(1, True, False), (2, False, True), (3, False, False)]:
        found = train(epochs, before, after, f"run={tmp_path / 'run'}")
    assert torch.equal(found, straight)


def test_autocast_in_bfloat16_is_that_of_torch(make: Any) -> None:
    ctx, net, _ = make(prepared=False)
    alone = copy.deepcopy(net.float())
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    plain = torch.optim.SGD(alone.parameters(), lr=1e-3)
    for batch in ctx.samples(
        {name: array.astype(np.float32) for name, array in DATA.items()}, batch=5, epochs=1
    ):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
            expected = loss_of(alone, batch)
        ctx.backward(loss)
        optimizer.step()
        plain.zero_grad()
        expected.backward()
        plain.step()
        assert torch.equal(weights_of(net), weights_of(alone))


def of_precision(opened: list[ht.Context], *arguments: str, by_hand: bool = False) -> list[float]:
    """The losses of a net of two layers; by_hand: under autocast of the script's own."""
    x = np.random.default_rng(0).uniform(-1, 1, (40, 6)).astype(np.float32)
    ctx = ht.init(*arguments)
    opened.append(ctx)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = ctx.prepare(net, optimizer, example=torch.from_numpy(x[:2]))
    losses = []
    for batch in ctx.samples({"x": x, "y": x.prod(1, keepdims=True)}, batch=8, epochs=1, seed=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
            outputs = model(batch["x"])
        loss = torch.nn.functional.mse_loss(outputs.to(batch["y"].dtype), batch["y"])
        ctx.backward(loss)
        if not any(word.startswith("shard.stage=") for word in arguments):
            gradient = torch.nn.utils.get_total_norm(
                [p.grad for p in net.parameters() if p.grad is not None]
            )
            assert gradient < 10, "no loss scale is in it"
        optimizer.step()
        losses.append(loss.item())
    ctx.close()
    return losses


def test_number_types_by_the_key(opened: list[ht.Context]) -> None:
    """bf16 is autocast around the model, to the last bit; the loss scale of fp16 is not in p.grad;
    without the key all is as it is."""
    plain = of_precision(opened)
    assert of_precision(opened, "speed.precision=fp32") == plain
    assert of_precision(opened, "speed.precision=fp64") == pytest.approx(plain, rel=1e-4)
    in_bf16 = of_precision(opened, by_hand=True)
    assert in_bf16 != plain and of_precision(opened, "speed.precision=bf16") == in_bf16
    in_fp16 = of_precision(opened, "speed.precision=fp16")
    assert in_fp16 != plain and in_fp16 == pytest.approx(plain, rel=0.05)
    assert of_precision(opened, "speed.precision=fp16", "shard.stage=1") == in_fp16
    assert of_precision(opened, "speed.precision=bf16", HIGHEST_STAGE) == pytest.approx(
        in_bf16, rel=1e-3
    )


@pytest.mark.in_turn
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning"
)  # of torch, inside of its compiler
def test_compiled_by_the_key(opened: list[ht.Context]) -> None:
    assert of_precision(opened, "speed.compile=default") == pytest.approx(
        of_precision(opened), rel=1e-4
    )
    opened.append(ht.init("speed.compile=default"))
    model = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    with pytest.raises(UserError, match="the model is compiled already"):
        opened[-1].prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@needs_extra("fully_sharded")
def test_an_example_of_the_inputs_is_asked_for_where_it_is_needed(opened: list[ht.Context]) -> None:
    opened.append(ht.init("shard.stage=3", "speed.precision=bf16"))
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        UserError, match="shard.stage needs an example of the model's inputs\n.*\n.*example=x"
    ):
        opened[-1].prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_grad_scaler_beside_a_loss_scale_or_local_steps(opened: list[ht.Context]) -> None:
    for words, what in [
        (["speed.precision=fp16"], "which already scales the loss"),
        (["comm.local_steps=2"], "this rank's part"),
    ]:
        opened.append(ht.init(*words))
        model, optimizer = opened[-1].prepare(
            net := torch.nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1)
        )
        scaler = torch.amp.GradScaler("cpu")
        for batch in opened[-1].samples({"x": torch.ones(4, 2)}, batch=2):
            opened[-1].backward(scaler.scale(model(batch["x"]).mean()))
            with pytest.raises(UserError, match=what):
                scaler.step(optimizer)
            break
        opened[-1].close()


def test_a_data_loader_gives_its_data_set(make: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(
        TensorDataset(torch.from_numpy(X), torch.from_numpy(DATA["y"])), batch_size=3, shuffle=True
    )
    ctx, model, optimizer = make()
    seen = []
    for x, y in ctx.samples(loader, batch=5, epochs=1):
        assert torch.equal(y, x.sum(1))
        seen += x[:, 0].tolist()
        ctx.backward(torch.nn.functional.mse_loss(model(x)[:, 0], y))
        optimizer.step()
    assert sorted(seen) == X[:, 0].tolist()


def test_layers_that_drop_are_seeded_by_step(make: Any) -> None:
    def drawn(seed: int, skip: int) -> list[float]:
        ctx, model, optimizer = make("seed=9")
        found = []
        for batch in ctx.samples(DATA, batch=5, epochs=1, seed=seed):
            torch.rand(skip)  # what else the script draws
            found.append(torch.rand(()).item())
            ctx.backward(loss_of(model, batch))
            optimizer.step()
        ctx.close()
        return found

    first = drawn(4, 0)
    assert (
        first == drawn(4, 0)
        and len(set(first)) == 4
        and first != drawn(4, 1)
        and first != drawn(5, 0)
    )


def mistakes() -> list[Any]:
    def after_step(call: Any) -> Any:
        def run(ctx: Any, model: Any, optimizer: Any) -> None:
            for batch in ctx.samples(DATA, batch=5, epochs=1):
                ctx.backward(loss_of(model, batch))
                optimizer.step()
                call(ctx, model, optimizer, batch)

        return run

    def in_step(call: Any) -> Any:
        def run(ctx: Any, model: Any, optimizer: Any) -> None:
            for batch in ctx.samples(DATA, batch=5, epochs=1):
                call(ctx, model, optimizer, batch)

        return run

    def twice(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        ctx.backward(loss_of(model, batch))
        ctx.backward(loss_of(model, batch))

    def plain(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch).backward()
        optimizer.step()

    def without_some_targets(part: Any) -> torch.Tensor:
        y = torch.where(part["y"] > 20, 0, -100)
        return torch.nn.functional.cross_entropy(
            torch.cat([part["x"] @ torch.ones(2, 1).double()] * 2, 1).requires_grad_(), y
        )

    def count_of_one_part(part: Any) -> Any:
        loss = part["x"].mean().requires_grad_()
        return loss if int(part["x"][0, 0]) % 4 else (loss, 1)

    def mean_after_each(ctx: Any, model: Any, optimizer: Any, batch: Any) -> None:
        assert [ctx.mean({"a": len(one)})["a"] for one in ctx.each(DATA, batch=12)] == [12, 8]
        ctx.mean({"a": 1})

    return [
        (
            in_step(lambda c, m, o, b: None),
            "ended without a call of optimizer.step()",
            "to accumulate gradients: ctx.accumulate()",
        ),
        (
            in_step(twice),
            "a second backward pass for one batch",
            "ctx.accumulate(loss_of, at_most=SAMPLES)",
        ),
        (
            in_step(lambda c, m, o, b: c.accumulate(lambda part: 2.0, at_most=2)),
            "the loss is a float",
            "one number that depends on the model",
        ),
        (
            in_step(lambda c, m, o, b: c.accumulate(without_some_targets, at_most=3)),
            "cross_entropy divides by ",
            "return loss, N in loss_of",
        ),
        (
            in_step(lambda c, m, o, b: c.accumulate(count_of_one_part, at_most=1)),
            "a count for some parts and none for others",
            "for each part",
        ),
        (
            in_step(lambda c, m, o, b: c.backward(loss_of(m, b), count=math.nan)),
            "count=nan is not a number of items",
            "(targets != -100).sum()",
        ),
        (
            in_step(lambda c, m, o, b: c.backward(loss_of(m, b), count=True)),
            "count=True is not a number of items",
            "the loss averages over",
        ),
        (in_step(mean_after_each), "without a count, a mean after ctx.each()", "count=NUMBER"),
        (
            in_step(lambda c, m, o, b: c.accumulate(None, at_most=0)),
            "at_most=0 is not a number of samples",
            "of a part, 1 or more",
        ),
        (
            in_step(plain),
            "optimizer.step() without ctx.backward(loss)",
            "instead of loss.backward()",
        ),
        (
            in_step(lambda c, m, o, b: c.backward(m(b["x"]))),
            "the loss is a tensor of shape (5, 1)",
            "the mean over this rank's samples",
        ),
        (
            in_step(lambda c, m, o, b: c.backward(2.0)),
            "the loss is a float",
            "one number that depends on the model",
        ),
        (
            in_step(lambda c, m, o, b: c.backward(torch.zeros(()))),
            "of shape () without a gradient",
            "depends on the model",
        ),
        (in_step(lambda c, m, o, b: b["z"]), "the samples have no 'z'", "their fields: x, y"),
        (
            in_step(lambda c, m, o, b: c.checkpoint(m, o)),
            "there is no run folder",
            "hvdtrain.init({'run': 'DIR'})",
        ),
        (
            after_step(lambda c, m, o, b: o.step()),
            "optimizer.step() without a new batch",
            "one step for each batch",
        ),
        (
            after_step(lambda c, m, o, b: c.checkpoint(m, None)),
            "is not the one that ctx.prepare() returned",
            "model, optimizer = ctx.prepare",
        ),
        (
            after_step(lambda c, m, o, b: c.log(loss=m.weight)),
            "loss is of shape (1, 2), not one number",
            "loss=loss.mean()",
        ),
        (
            after_step(lambda c, m, o, b: c.log(loss="a")),
            "loss is a str, not a number",
            "a number, or a tensor of one",
        ),
        (
            after_step(lambda c, m, o, b: c.samples(DATA, batch=2)),
            "ctx.samples() was called twice",
            "ctx.each(dataset, batch=...)",
        ),
        (
            after_step(lambda c, m, o, b: c.resume()),
            "ctx.resume() was called after ctx.samples()",
            "right after ctx.prepare()",
        ),
        (
            lambda c, m, o: c.backward(torch.zeros(())),
            "called outside of a loop over ctx.samples()",
            "a DataLoader is not needed",
        ),
        (lambda c, m, o: c.resume(), "there is no run folder", "hvdtrain.init({'run': 'DIR'})"),
        (
            lambda c, m, o: c.prepare(m, o),
            "ctx.prepare() was called twice",
            "one optimizer of several groups",
        ),
        (
            lambda c, m, o: c.checkpoint(m, o),
            "ctx.checkpoint() was called before ctx.samples()",
            "inside the loop",
        ),
        (
            lambda c, m, o: c.samples(DATA, batch=0),
            "batch=0 is not a number of samples",
            "1 or more, over all ranks",
        ),
        (
            lambda c, m, o: c.samples(DATA, batch=2, epochs=0),
            "epochs=0 is not a length",
            "a number above 0",
        ),
        (
            lambda c, m, o: c.samples(DATA, batch=2, seed=-1),
            "seed=-1 is not a seed",
            "a whole number, 0 or more",
        ),
        (
            lambda c, m, o: c.samples(iter([1]), batch=2),
            "is a list_iterator, whose samples come in an order of its own",
            "docs",
        ),
        (
            lambda c, m, o: list(c.each(DATA, batch=True)),
            "batch=True is not a number of samples",
            "batch=256",
        ),
        (
            lambda c, m, o: c.mean({"a": torch.ones(2)}),
            "a is of shape (2,), not one number",
            "a=a.mean()",
        ),
        (
            lambda c, m, o: c.mean({1: 2.0}),
            "{1: 2.0} is not a mapping of names to numbers",
            "count=batch.count",
        ),
        (
            lambda c, m, o: c.mean({"a": 1}, count=-1.5),
            "count=-1.5 is not a number of items",
            "the loss averages over",
        ),
        (
            lambda c, m, o: (c.close(), c.mean({"a": 1})),
            "the context is closed",
            "ctx = hvdtrain.init(...) again",
        ),
        (
            lambda c, m, o: c.samples(DATA, batch=21),
            "batch=21 is more than the 20 samples",
            "20 or less",
        ),
        (
            lambda c, m, o: o.add_param_group({"params": []}),
            "a parameter group was added after ctx.prepare()",
            "all groups before ctx.prepare()",
        ),
        (
            lambda c, m, o: o.load_state_dict({}),
            "gets its state from ctx.resume()",
            "state = ctx.resume(), after prepare()",
        ),
    ]


def test_padded_samples_need_a_count_in_each_call(opened: list[ht.Context]) -> None:
    """And what is logged and averaged is weighted with it. A step without any item leaves the
    weights as they are."""
    tokens = {"tokens": [np.arange(n) % 5 for n in (2, 9, 3, 7, 2, 2)]}

    def next_tokens(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y = part["tokens"][:, 1:].flatten()
        logits = model(part["tokens"][:, :-1].clamp(min=0)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, y, ignore_index=-100), (y != -100).sum()

    torch.manual_seed(0)
    net = torch.nn.Embedding(5, 5).double()
    alone = copy.deepcopy(net)
    opened.append(ctx := ht.init("data.pad={tokens: -100}"))
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for batch in ctx.samples(tokens, batch=3, epochs=1.5, seed=1):
        calls = [lambda: ctx.log(a=1), lambda: ctx.mean({"a": 1}), lambda: ctx.mean({"a": 1})]
        for call in calls:
            with pytest.raises(UserError, match="its count is not known yet"):
                call()
        before = net.weight.detach().clone()
        if batch.step == 2:
            ctx.accumulate(lambda part: (next_tokens(part)[0] * math.nan, 0), at_most=1)
            optimizer.step()
            assert torch.equal(net.weight, before)
            continue
        alone.load_state_dict(net.state_dict())
        y = batch["tokens"][:, 1:].flatten()
        alone.zero_grad()
        of_all = torch.nn.functional.cross_entropy(
            alone(batch["tokens"][:, :-1].clamp(min=0)).flatten(0, 1), y
        )
        of_all.backward()
        assert ctx.accumulate(next_tokens, at_most=1).item() == pytest.approx(
            of_all.item(), rel=1e-12
        )
        assert alone.weight.grad is not None
        torch.testing.assert_close(net.weight.grad, alone.weight.grad, rtol=0, atol=1e-14)
        assert ctx._batches.count("") == (y != -100).sum()
        optimizer.step()
    opened.append(ctx := (ctx.close(), ht.init("data.pad={tokens: -100}"))[1])
    model, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in ctx.samples(tokens, batch=3, epochs=1):
        with pytest.raises(
            UserError, match="data.pad makes samples of tokens variable-length"
        ) as refused:
            ctx.backward(net.weight.sum())
        assert "for a mean over samples, N is batch.count" in refused.value.fix
        break


@pytest.mark.parametrize(
    ("dtype", "targets"),
    [(torch.float16, 4099), (torch.float16, 70000), (torch.bfloat16, 301)],
)
def test_a_mean_over_samples_whose_number_the_logits_type_rounds(
    dtype: torch.dtype, targets: int
) -> None:
    logits = torch.zeros(targets, 2, dtype=dtype, requires_grad=True)
    y = torch.zeros(targets, dtype=torch.int64)
    check_mean_over_samples(torch.nn.functional.cross_entropy(logits, y), "here", "fix")
    y[: targets // 2] = -100
    with pytest.raises(UserError, match=f"not by its {targets} targets"):
        check_mean_over_samples(torch.nn.functional.cross_entropy(logits, y), "here", "fix")


@pytest.mark.parametrize(
    ("run", "what", "fix"),
    mistakes(),
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_mistakes_in_a_loop(make: Any, run: Any, what: str, fix: str) -> None:
    ctx, model, optimizer = make()
    with pytest.raises(UserError) as caught:
        run(ctx, model, optimizer)
    assert what in caught.value.what, str(caught.value)
    assert fix in caught.value.fix or fix == "docs", str(caught.value)


def unfit() -> list[Any]:
    net = torch.nn.Linear(2, 2)
    stepped = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    stepped.step()
    scheduled = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    words = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    complex_numbers = torch.nn.Linear(2, 2, dtype=torch.complex64)
    in_bf16 = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    return [
        (
            in_bf16,
            torch.optim.SGD(in_bf16.parameters(), lr=0.1),
            "weight has type torch.bfloat16, which a checkpoint cannot store",
            "speed.precision=bf16",
        ),
        (
            words,
            torch.optim.SGD(words.parameters(), lr=0.1),
            "0 makes sparse gradients",
            "sparse=False",
        ),
        (
            complex_numbers,
            torch.optim.SGD(complex_numbers.parameters(), lr=0.1),
            "weight is complex",
            "torch.view_as_complex()",
        ),
        (net, stepped, "the optimizer has already made steps", "prepare() first"),
        (
            net,
            scheduled,
            "a scheduler already uses this optimizer",
            "then the scheduler of that optimizer",
        ),
        (
            net,
            torch.optim.SGD([net.weight], lr=0.1),
            "bias requires a gradient, but the optimizer does not have it",
            "requires_grad_(False)",
        ),
        (
            net,
            torch.optim.SGD([torch.nn.Parameter(torch.ones(7))], lr=0.1),
            "parameters that are not the model's, of shape (7,)",
            "after",
        ),
        (
            frozen,
            torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1),
            "parameters that are not the model's",
            "one module",
        ),
        (
            net,
            torch.optim.LBFGS(net.parameters()),
            "LBFGS computes the loss several times in a step",
            "as SGD or AdamW",
        ),
        (
            "net",
            torch.optim.SGD(net.parameters(), lr=0.1),
            "a str and a SGD, not a torch.nn.Module",
            "ctx.prepare(model, optimizer)",
        ),
    ]


@pytest.mark.parametrize(("model", "optimizer", "what", "fix"), unfit())
def test_a_model_and_an_optimizer_that_do_not_belong_together(
    make: Any, model: Any, optimizer: Any, what: str, fix: str
) -> None:
    ctx, _, _ = make(prepared=False)
    with pytest.raises(UserError) as caught:
        ctx.prepare(model, optimizer)
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    with pytest.raises(UserError, match="no model was prepared"):
        ctx.samples(DATA, batch=2)


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (
            ["epochs=3"],
            "epochs is not supported in a custom loop",
            "ctx.samples(dataset, batch=..., epochs=...)",
        ),
        (
            ["model.name=mlp"],
            "model.name is not supported in a custom loop",
            "ctx.prepare(model, optimizer)",
        ),
        (
            ["augment.flip=true"],
            "augment.flip is not supported in a custom loop",
            "use hvdtrain.train(); a custom loop has checkpoint, comm",
        ),
        (
            ["guard.lost=shrink"],
            "guard.lost is not supported in a custom loop",
            "hvdtrain.run(train, {...}) has guard.lost=shrink",
        ),
        (["cheque.every=3"], "there is no key cheque.every", "did you mean checkpoint.every?"),
        (["guard.nonfinite=rollback"], "cannot undo what a custom loop has done", "stop or skip"),
        (["resume=somewhere"], "resume= needs run=", "run=DIR"),
    ],
)
def test_keys_that_an_own_loop_does_not_have(arguments: list[str], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        ht.init(*arguments)
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)
    assert "hvdtrain.init()" in caught.value.where
    ht.init().close()  # nothing is left open


def test_a_run_folder_of_something_else(make: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ctx, model, optimizer = make(f"run={run}")
    for batch in ctx.samples(DATA, batch=5, epochs=0.5):
        ctx.backward(loss_of(model, batch))
        optimizer.step()
        ctx.checkpoint(model, optimizer)
    ctx.close()
    ctx, model, _ = make(f"run={run}")
    with pytest.raises(
        UserError,
        match="has a checkpoint, but the loop would start from the beginning\n.*\n"
        "  fix: state = ctx.resume",
    ):
        ctx.samples(DATA, batch=5)
    ctx.resume()
    with pytest.raises(
        UserError, match="the checkpoint has 20 samples with seed=1, global sampling, ctx.samples"
    ):
        ctx.samples(DATA, batch=5, seed=2)
    ctx.close()
    ctx = ht.init(f"run={run}")
    wider = torch.nn.Linear(3, 1).double()
    ctx.prepare(wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"p.weight has shape \(1, 2\), the model has \(1, 3\)"):
        ctx.resume()
    ctx.close()
    with pytest.raises(UserError, match="the checkpoint has another"):
        ht.train({"run": str(run), "epochs": 1, "model.name": "linear", "log.display": "lines"})


def test_values_beside_model_and_optimizer() -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 5
    )
    given = {
        "s": scheduler,
        "t": torch.tensor(3.5),
        "n": np.float32(0.5),
        "nan": math.nan,
        "empty": torch.zeros(0, 2),
        "none": None,
    }
    found = from_arrays(to_arrays(given))
    assert (
        found["s"] == scheduler.state_dict()
        and found["t"].item() == 3.5
        and found["n"] == 0.5
        and math.isnan(found["nan"])
    )
    assert tuple(found["empty"].shape) == (0, 2) and found["none"] is None
    kinds = {
        1: (2, [3]),
        "1": Counter("aa"),
        None: OrderedDict(b=1),
        False: np.float32(0.1),
        "i": np.int64(7),
        "big": np.arange(3, dtype=np.uint16),
    }
    same = from_arrays(to_arrays({"of": kinds}))["of"]
    assert repr(same) == repr({**kinds}), "types and keys are those of before"
    mask = np.ma.masked_array([1.0, 2.0], [True, False])
    for lossy in (
        mask,
        defaultdict(int),
        IntEnum("Mode", "A B").A,
        torch.finfo(torch.half),
        {1, 2},
        b"a",
        {(1, 2): 3},
    ):
        with pytest.raises(UserError, match="which a checkpoint cannot store"):
            to_arrays({"v": lossy})
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(from_arrays(to_arrays({"z": conjugate}))["z"], conjugate)
    for value, kind in (
        (np.complex64(1j), "complex64"),
        (np.datetime64("2026-01-01"), "datetime64"),
        (torch.eye(2).to_sparse(), "Tensor"),
    ):
        with pytest.raises(UserError, match=f"v is a {kind}, which a checkpoint cannot store"):
            to_arrays({"v": value})
    with pytest.raises(
        UserError,
        match=r"a.b\[1\] is a object, which a checkpoint cannot store\n.*\n  fix: numbers, texts",
    ):
        to_arrays({"a": {"b": [1, object()]}})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UserError, match="is nested more than 32 deep"):
        to_arrays({"a": endless})
    with pytest.raises(UserError, match="MiB, but at most 256"):
        to_arrays({"a": np.zeros(2**26)})
    broken = to_arrays({"a": torch.ones(2)})
    with pytest.raises(ValueError, match="KeyError"):
        from_arrays({"e.json": broken["e.json"]})


def test_names_that_differ_over_ranks_are_seen_by_their_fingerprint() -> None:
    one = Logged()
    two = Logged()
    one.add({"loss": 1.0}, 2.0)
    two.add({"lass": 1.0}, 2.0)
    (a, aa), (b, bb) = (
        (each.fingerprint()["names"], each.fingerprint()["squares"]) for each in (one, two)
    )
    assert (2 * a) ** 2 == 2 * (aa + aa) and (a + b) ** 2 != 2 * (aa + bb)
    assert math.isnan(quotient(1.0, 0.0))
