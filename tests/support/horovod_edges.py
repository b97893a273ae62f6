"""What legal programs may do at the edges of Horovod's API, as one program for 3 ranks: python
tests/support/horovod_edges.py"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch
from waiting import wait_until

import hvdtrain.horovod as hvd

SIZES = (1, 50, 113, 1000, 10_000, 30_000, 262_144)
NUMBERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
OPS = "Average", "Sum", "Min", "Max", "Product", "Adasum"


def given(length: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(length * 10 + rank)
    return (
        torch.randn(length, generator=made)
        * 10.0 ** torch.randint(-3, 3, (length,), generator=made)
    ).to(dtype)


def bits_are_the_programs() -> None:
    """Results are the same on every rank and each time, whichever rank is late. Small sums are
    added in the order of ranks, in the block of a round and, if ranks ask for different calls,
    outside it."""
    for dtype in (torch.float32, torch.bfloat16):
        mine = {n: given(n, hvd.rank(), dtype) for n in SIZES}
        found = [sums_of(mine, late) for late in range(3)]
        assert hvd.allgather_object(found) == [[found[0]] * 3] * hvd.size()
        small = reduce(torch.add, [given(50, rank, dtype) for rank in range(hvd.size())])
        for ahead in range(hvd.size()):
            names = [f"first, then {ahead}", f"second, then {ahead}"]
            if hvd.rank() == ahead:
                handles = [hvd.allreduce_async(mine[50], op=hvd.Sum, name=name) for name in names]
                sums = [hvd.synchronize(handle) for handle in handles]
            else:
                sums = [hvd.allreduce(mine[50], op=hvd.Sum, name=name) for name in names]
            assert all(torch.equal(found, small) for found in sums)


def sums_of(mine: dict[int, torch.Tensor], late: int) -> str:
    """Returns a digest of sums alone, in groups and together with others, while one rank is
    late."""
    handles = [hvd.allreduce_async(mine[n], op=hvd.Sum) for n in reversed(SIZES)]
    if hvd.rank() == late:
        time.sleep(0.01)
    found = [
        *hvd.grouped_allreduce(list(mine.values()), op=hvd.Sum),
        *hvd.grouped_allreduce([mine[n] for n in SIZES[:4]], op=hvd.Sum),
    ]
    found += [hvd.synchronize(handle) for handle in handles]
    found += [hvd.allreduce(x, op=hvd.Sum) for x in mine.values()]
    return hashlib.sha256(torch.cat(found).float().numpy().tobytes()).hexdigest()


def minima_keep_a_nan() -> None:
    for length in (4, 4000):
        x = torch.arange(length, dtype=torch.float32)
        x[hvd.rank()] = torch.nan
        for op in (hvd.Min, hvd.Max):
            assert hvd.allreduce(x, op=op)[:3].isnan().all()


def threads_ask_in_other_orders() -> None:
    """Each rank waits in its main thread for what a thread of another one asks for later than a
    deadlock would be told."""
    found: list[float] = []

    def call(name: str) -> None:
        found.append(hvd.allreduce(torch.ones(3), op=hvd.Sum, name=name)[0].item())

    first, second = ("a", "b") if hvd.rank() == 0 else ("b", "a")
    thread = threading.Thread(target=lambda: (time.sleep(2.5), call(second)))
    thread.start()
    call(first)
    thread.join()
    assert found == [3.0, 3.0]


def kinds_share_a_name() -> None:
    x = torch.ones(2)
    starts: list[Callable[[], int]] = [
        lambda: hvd.allreduce_async(x, name="x", op=hvd.Sum),
        lambda: hvd.allgather_async(x, name="x"),
        lambda: hvd.broadcast_async(x, 0, name="x"),
        lambda: hvd.grouped_allreduce_async([x, x], name="x", op=hvd.Sum),
    ]
    order = starts if hvd.rank() else starts[::-1]
    found = [hvd.synchronize(handle) for handle in [start() for start in order]]
    summed, gathered, sent, grouped = found if hvd.rank() else found[::-1]
    assert summed[0] == 3 and len(gathered) == 6 and sent[0] == 1 and grouped[1][0] == 3


def removed_sets_leave_no_threads() -> None:
    """Except the thread of the set of all ranks, which the first turn may start."""
    counts = []
    for _turn in range(4):
        pair = hvd.add_process_set([0, 1])
        handle = (
            hvd.allreduce_async(torch.ones(5000), op=hvd.Sum, process_set=pair)
            if pair.included()
            else None
        )
        hvd.allreduce(torch.ones(2_000_000))  # while the thread of the set makes its rounds
        assert hvd.remove_process_set(pair)
        if handle is not None:
            assert hvd.synchronize(handle)[0] == 2
        hvd.barrier()
        counts.append(threading.active_count())
    wait_until(
        lambda: threading.active_count() <= counts[0],
        f"the end of all threads but the {counts[0]} of the first turn",
    )


def every_dtype_leaves_the_queue_whole() -> None:
    """A reduction is right, or an error of its caller; the next one works."""
    for dtype in (*NUMBERS, *FLOATS, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for op in OPS:
            for factors in ({}, {"prescale_factor": 2.0, "postscale_factor": 3.0}):
                x = (torch.tensor([1, 2, 3]) + hvd.rank()).to(dtype)
                try:
                    found = hvd.allreduce(x, op=getattr(hvd, op), **factors)
                except ValueError:
                    assert (
                        dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn)
                        or op == "Adasum"
                    ), (dtype, op)
                    continue
                if dtype in NUMBERS and op == "Average":
                    assert found.tolist() == [
                        value * (6 if factors else 1) for value in (2, 3, 4)
                    ], (dtype, found)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == 3


def a_poll_goes_on_with_other_process_sets() -> None:
    """Rank 0 polls what the others make after they have waited for its call in a process set."""
    every = [hvd.add_process_set([0, 1]), hvd.add_process_set([0, 2])]
    if hvd.rank() == 0:
        inner = [hvd.allreduce_async(torch.ones(3), op=hvd.Sum, process_set=each) for each in every]
        outer = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="outer")
        while not hvd.poll(outer):
            time.sleep(0.001)
        assert [hvd.synchronize(handle)[0].item() for handle in (*inner, outer)] == [2, 2, 3]
    else:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=every[hvd.rank() - 1])[0] == 2
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="outer")[0] == 3
    assert all(hvd.remove_process_set(each) for each in every)


def small_tensors_of_all_dtypes_travel_together() -> None:
    given = [
        torch.ones(1, dtype=dtype)
        for dtype in (torch.float32, torch.complex128, torch.int8, torch.complex64, torch.float64)
    ]
    assert [x.item() for x in hvd.grouped_allreduce(given, op=hvd.Sum)] == [hvd.size()] * len(given)


def sparse_gradients_are_trained() -> None:
    """The rows that a rank touches differ, and one row alone is a view of an odd stride."""
    for rows in ([hvd.rank(), hvd.rank(), 4], [5]):
        net = torch.nn.Embedding(6, 3, sparse=True)
        torch.nn.init.ones_(net.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.3), named_parameters=net.named_parameters()
        )
        net(torch.tensor(rows)).sum().backward()
        optimizer.step()
        touched = [
            sum(rows.count(row) for rows in every)
            for every in [hvd.allgather_object(rows)]
            for row in range(6)
        ]
        assert torch.allclose(
            net.weight[:, 0], 1 - 0.1 * torch.tensor(touched, dtype=torch.float32)
        ), (touched, net.weight)


def results_may_be_changed_in_place() -> None:
    x = torch.ones(6, 2, requires_grad=True)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        hvd.allreduce,
        hvd.allgather,
        lambda y: hvd.broadcast(y, 0),
        hvd.alltoall,
        hvd.reducescatter,
        lambda y: hvd.grouped_allreduce([y])[0],
        lambda y: hvd.grouped_allgather([y])[0],
        lambda y: hvd.grouped_reducescatter([y])[0],
    ]
    for call in calls:
        y = x * 1
        found = torch.nn.functional.relu(call(y).mul_(3), inplace=True)
        y.mul_(2)  # nothing keeps what it was
        found.sum().backward()
    assert x.grad is not None


def second_derivatives_go_through_collectives() -> None:
    """Differentiates the sum over ranks of L twice; L is a rank's sum of y^2, and y = x^2 is summed
    over ranks, or gathered, with x = 1 + r on rank r."""
    size = hvd.size()
    mine = 1.0 + hvd.rank()
    total = sum((1.0 + rank) ** 2 for rank in range(size))
    for call, first, second in (
        (lambda y: hvd.allreduce(y, op=hvd.Sum), 4 * size * total * mine, None),
        (
            hvd.allgather,
            4 * mine**3,
            (4 + 8 / size) * mine**2,
        ),  # its gradient is the average over ranks, as Horovod's is
    ):
        x = torch.full((1,), mine, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(call(x**2).square().sum(), x, create_graph=True)
        assert torch.allclose(grad, torch.tensor([first], dtype=torch.float64)), (grad, first)
        (curvature,) = torch.autograd.grad(grad.sum(), x)
        # the derivative of the sum over ranks of grad: of rank s it has 4 size (2 x_r) x_s, and of
        # this one 4 size total
        expected = (
            second
            if second is not None
            else 4 * size * total + 8 * size * mine * sum(1.0 + rank for rank in range(size))
        )
        assert torch.allclose(curvature, torch.tensor([expected], dtype=torch.float64)), (
            curvature,
            expected,
        )


def a_schedule_of_the_optimizer_before_it_was_wrapped_goes_on() -> None:
    net = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05, optimizer.param_groups[0]["lr"]


def misuse_of_an_optimizer_is_an_error() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=2
    )
    net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(AssertionError, match="before optimizer.step"):
        optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="is already a DistributedOptimizer"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="splits contains a float"):
        hvd.alltoall(torch.ones(3, 1), torch.ones(3))


class Known:
    """A class that every rank has."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def an_object_that_cannot_be_pickled_is_an_error_everywhere() -> None:
    with pytest.raises(ValueError, match="rank 0: dict cannot be sent: .*local"):
        hvd.broadcast_object({"a": lambda: 1} if hvd.rank() == 0 else None)
    with pytest.raises(ValueError, match="rank 2: generator cannot be sent: TypeError"):
        hvd.allgather_object((i for i in ()) if hvd.rank() == 2 else 1)
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
    keys = {np.int64(1): 5, frozenset({1, 2}): [re.M | re.I], (1, "a"): {None: 2}}
    assert hvd.broadcast_object(keys if hvd.rank() == 0 else None) == keys
    assert [each.rank for each in hvd.allgather_object(Known(hvd.rank()))] == [0, 1, 2]
    endless: list[object] = []
    endless.append(endless)
    found = hvd.broadcast_object(endless if hvd.rank() == 1 else None, root_rank=1)
    assert found[0] is found


def a_handle_ends_with_its_job() -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    hvd.shutdown()
    hvd.init()
    for use in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match=r"belongs to a call before hvd.shutdown\(\)"):
            use(handle)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == 3


def calls_in_inference_mode_leave_the_queue_whole() -> None:
    """Tests small tensors, tensors in a shared buffer, and reductions outside inference mode into a
    tensor created in it."""
    for length in (3, 20_000):
        for name in ("before", "after"):
            with torch.inference_mode():
                made = [
                    hvd.allreduce_async(torch.ones(length), op=hvd.Sum, name=f"{name}.{length}.{i}")
                    for i in range(2)
                ]
                assert all(hvd.synchronize(handle).sum() == 3 * length for handle in made)
                assert (
                    len(hvd.allgather(torch.ones(length))) == 3 * length
                    and hvd.broadcast_object(length, 0) == length
                )
                inside = torch.ones(length)
            outside = [
                hvd.allreduce_async(torch.ones(length + 1), op=hvd.Sum, name=f"{name}.{length}.{i}")
                for i in range(2)
            ]
            assert all(hvd.synchronize(handle).sum() == 3 * length + 3 for handle in outside)
            assert hvd.allreduce_(inside, op=hvd.Sum) is inside and inside.sum() == 3 * length


def views_with_a_conjugate_a_sign_or_a_direction() -> None:
    for length in (3, 20_000):
        z = torch.full((length,), complex(1, hvd.rank() + 1))
        assert torch.equal(hvd.allreduce(z.conj(), op=hvd.Sum), torch.full_like(z, complex(3, -6)))
        assert torch.equal(hvd.allgather(z.conj())[-length:], torch.full_like(z, complex(1, -3)))
        assert torch.equal(hvd.broadcast(z.conj().imag, 1), torch.full((length,), -2.0))
        assert torch.equal(hvd.broadcast_object(z.conj(), 1), torch.full_like(z, complex(1, -2)))
        hvd.allreduce_(z.conj(), op=hvd.Sum)
        assert torch.equal(z, torch.full_like(z, complex(3, 6)))
        backwards = np.arange(length, dtype=np.float64)
        hvd.allreduce_(backwards[::-1], op=hvd.Sum)
        assert np.array_equal(backwards, 3.0 * np.arange(length))
        backwards += hvd.rank()
        hvd.broadcast_(backwards[::-1], 2)
        assert np.array_equal(backwards, 3.0 * np.arange(length) + 2)


def what_no_rank_can_send_is_an_error_of_that_call_alone() -> None:
    with pytest.raises(ValueError, match="elements of this tensor share memory"):
        hvd.allreduce_(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="an array of dtype object"):
        hvd.allreduce(np.array([None, 1]))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for params, what in (
        (model, "invalid params of type <class 'torch.nn.modules.container.Sequential'>"),
        (optimizer.state_dict(), "a mapping without tensors"),
        ("weights", "invalid params of type <class 'str'>"),
        ([("weight", 3)], "invalid params: a int among them"),
        (list(model.state_dict()), "invalid params: a str among them"),
    ):
        with pytest.raises(ValueError, match=re.escape(what)):
            hvd.broadcast_parameters(params, 0)
    hvd.broadcast_parameters({}, 0)


def an_optimizer_state_keeps_its_dtypes() -> None:
    """torch's load_state_dict() would convert them to the parameters' dtypes."""
    for kind, entry in ((torch.optim.NAdam, "mu_product"), (torch.optim.ASGD, "eta")):
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = kind([weight], lr=0.01)
        for _ in range(1 + hvd.rank()):
            weight.grad = torch.full_like(weight, 0.1)
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        found = {
            name: (str(x.dtype), x.double().tolist()) for name, x in optimizer.state[weight].items()
        }
        assert found[entry][0] == "torch.float32" and hvd.allgather_object(found) == [found] * 3


def lbfgs_is_the_same_on_all_ranks() -> None:
    """A search along a line, whose length is of the losses: of all ranks, or they would call the
    closure another number of times."""
    made = torch.Generator().manual_seed(hvd.rank())
    x = torch.randn(20, 4, generator=made)
    y = torch.randn(20, 3, generator=made)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"),
        model.named_parameters(),
    )
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(4)]
    mine = calls, losses, model[0].weight.tolist()
    assert losses[-1] < losses[0] and hvd.allgather_object(mine) == [mine] * 3


def a_state_is_synchronized_as_it_is() -> None:
    """Not as it was when it was made, or committed."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=hvd.rank())
    torch.nn.init.constant_(model.weight, 5.0 + hvd.rank())
    state.sync()
    assert (model.weight.item(), optimizer.param_groups[0]["lr"], state.epoch) == (5.0, 0.1, 0)
    torch.nn.init.constant_(model.weight, 7.0)
    state.restore()
    assert model.weight.item() == 5.0


def a_default_device_of_the_script_is_the_scripts_alone() -> None:
    """Like after torch.set_default_device("cuda"). The device here has no numbers, so a tensor that
    hvdtrain creates on it would be noticed."""
    size = hvd.size()
    ranks = torch.arange(hvd.size())
    x = torch.arange(6.0) + hvd.rank()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sparse = torch.tensor([0.0, 4.0]).to_sparse()
    inputs = torch.ones(3, 2)
    empty = torch.empty(0)
    torch.set_default_device("meta")
    try:
        things = (
            hvd.broadcast_object({"w": x, "none": empty} if hvd.rank() == 1 else None, 1),
            hvd.allgather_object(x),
        )
        rows, received = hvd.alltoall(x, splits=[2, 2, 2], name="on no device")
        found = (
            hvd.allgather(x),
            hvd.reducescatter(x, op=hvd.Sum),
            hvd.allreduce(x, op=hvd.Adasum),
            hvd.allreduce(x, op=hvd.Product),
        )
        added = hvd.sparse_allreduce_async(sparse, name="sparse on no device", op=hvd.Sum)()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=2)
        hvd.join()
    finally:
        torch.set_default_device("cpu")
    assert (
        torch.equal(things[0]["w"], torch.arange(6.0) + 1)
        and len(things[0]["none"]) == 0
        and len(things[1]) == size
    )
    assert received.tolist() == [2] * size and torch.equal(
        rows.view(3, 2) - ranks.view(3, 1), 2.0 * hvd.rank() + torch.tensor([[0.0, 1.0]] * 3)
    )
    assert [len(tensor) for tensor in found] == [18, 2, 6, 6] and torch.equal(
        added.to_dense(), torch.tensor([0.0, 4.0 * size])
    )
    assert not any(
        tensor.is_meta
        for tensor in (
            *found,
            *model.parameters(),
            *(state["momentum_buffer"] for state in optimizer.state.values()),
        )
    )


CHECKS = (
    a_default_device_of_the_script_is_the_scripts_alone,
    calls_in_inference_mode_leave_the_queue_whole,
    views_with_a_conjugate_a_sign_or_a_direction,
    what_no_rank_can_send_is_an_error_of_that_call_alone,
    an_optimizer_state_keeps_its_dtypes,
    lbfgs_is_the_same_on_all_ranks,
    a_state_is_synchronized_as_it_is,
    bits_are_the_programs,
    minima_keep_a_nan,
    threads_ask_in_other_orders,
    kinds_share_a_name,
    removed_sets_leave_no_threads,
    every_dtype_leaves_the_queue_whole,
    a_poll_goes_on_with_other_process_sets,
    small_tensors_of_all_dtypes_travel_together,
    sparse_gradients_are_trained,
    results_may_be_changed_in_place,
    second_derivatives_go_through_collectives,
    a_schedule_of_the_optimizer_before_it_was_wrapped_goes_on,
    misuse_of_an_optimizer_is_an_error,
    an_object_that_cannot_be_pickled_is_an_error_everywhere,
    a_handle_ends_with_its_job,
)


if __name__ == "__main__":
    hvd.init()
    for check in CHECKS:
        check()
    print("whole", hvd.rank())
