"""shard.stage=3 with torch's FSDP2: each rank has its rows of every weight, and the whole weights
of one block at a time.

Source: Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import SameOrder
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Cut
from hvdtrain.errors import UserError
from hvdtrain.extras.divided.blocks import units
from hvdtrain.extras.divided.communicators import Communicating
from hvdtrain.extras.divided.deferred import Deferred
from hvdtrain.extras.divided.divisions import layer_division_of
from hvdtrain.extras.divided.same_weights import as_on_rank_0
from hvdtrain.extras.fully_sharded.torch.gathered_types import (
    REDUCES_UNREACHED,
    Pass,
    gather_in_16_bits,
    group_of,
    reduce_all_of,
)
from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import of_shards, shard_summary, total_over
from hvdtrain.frameworks.torch.private_api import in_backward, storage_of, tree_leaves
from hvdtrain.frameworks.torch.strategy import Shard, Strategy, Wrapped, runs_ahead


class ShardedModel(NamedTuple):
    """A model whose parameters are DTensors: each rank has its rows of each parameter."""

    model: torch.nn.Module
    mesh: Mesh
    summary: str  # "in 12 blocks and the rest"
    # for parameters that are split over the ranks of a tensor group
    cuts: Mapping[torch.nn.Parameter, Cut]
    # check the order in which ranks gather and reduce units, and a tensor group computes layers
    orders: Sequence[SameOrder]

    def for_autocast(
        self, make_pass: Pass, device: torch.device, dtype: torch.dtype | None
    ) -> ShardedModel:
        """Returns the model, whose weights are gathered in 16 bits from now on if layers compute in
        `dtype`; None: no weights. A collective.

        make_pass: runs a pass of the model; it may change buffers.
        """
        if dtype is None:
            return self
        share = gather_in_16_bits(self.model, make_pass, device, dtype, self.mesh.world)
        return self._replace(
            summary=f"{self.summary}, {share:.1%} of the weights gathered in "
            f"{str(dtype).removeprefix('torch.')}"
        )

    def strategy(self, config: Config) -> Fsdp:
        return Fsdp(self, config.shard.offload == "optimizer")


def shard_model(
    model: torch.nn.Module,
    deferred: Deferred | None,
    config: Config,
    mesh: Mesh,
    device_mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    communicating: Communicating = nullcontext,
) -> ShardedModel:
    """Shards an existing model and replaces its parameters; `deferred` computes its meta tensors.

    Weights and gradients are sent in their own `dtype` until for_autocast() is called. Every rank
    calls it; `communicating`: from the stopwatch. Raises UserError for a parameter that is a single
    number.
    """
    for name, p in model.named_parameters():
        if not p.ndim:
            what = (
                f"the parameter {name} is a single number: shard.stage=3 gives each rank rows of "
                "each parameter"
            )
            raise UserError(
                what, config.where("shard.stage"), "make it of shape (1,), or shard.stage=2"
            )
    if (
        device.type != "cpu"
    ):  # the host does not wait for FSDP2's collectives, which run in separate streams
        communicating = nullcontext
    layers = None
    orders = [_order(config, mesh, device)]
    division = layer_division_of(config)
    if division is not None:
        layers = division(model, config, mesh, device)
        orders += [layers.order]
    blocks = units(model)
    filled = set[torch.nn.Module]()

    def fill(unit: torch.nn.Module) -> None:
        _fill(unit, filled, deferred, mesh, device, dtype)
        if layers:
            layers.cut(unit)
            filled.update(unit.modules())

    options = _options(config, device_mesh, device)
    for block in blocks:
        fill(block)
        fully_shard(block, **options)
    fill(model)
    # backward would immediately gather it again
    fully_shard(model, **options | {"reshard_after_forward": False})
    sharded = {
        name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    for (
        name,
        module,
    ) in (
        sharded.items()
    ):  # each of them: no setting is inherited, and FSDP2's default is a mean over ranks
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        _reduce_unreached(module)
        unit = _Unit(
            model.get_submodule(name),
            name or ("the rest of the model" if blocks else "the model"),
            orders[0],
            gathers=mesh.shard.size > 1,
        )
        module.set_custom_all_gather(_AllGather(unit, communicating))
        module.set_custom_reduce_scatter(_ReduceScatter(unit, communicating))
    if "asynchronous" in mesh.world.features:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # it is an FSDPModule now
    model.register_forward_hook(
        functools.partial(_after_forward, list(sharded.values()), orders, communicating)
    )
    parts = (
        f"in {len(blocks)} blocks and the rest"
        if blocks
        else "as one unit: the model has no `blocks`"
    )
    cuts = (
        {p: layers.names[name] for name, p in model.named_parameters() if name in layers.names}
        if layers
        else {}
    )
    return ShardedModel(model, mesh, parts, cuts, orders)


def _reduce_unreached(module: Any) -> None:
    """Gives a zero gradient to each parameter of this FSDP2 module that this rank's samples do not
    reach: another rank's samples may reach it."""
    if REDUCES_UNREACHED:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    elif group := group_of(module):
        reduce_all_of(group)


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Returns torch's device mesh of the ranks of mesh.data. A collective of all ranks."""
    if mesh.data.size < mesh.world.size:
        # the same layout as coordinates() of comm/mesh.py
        grid = torch.arange(mesh.world.size, device="cpu").view(mesh.data.size, -1)
        return DeviceMesh(device.type, grid, mesh_dim_names=("shard", "tensor"))["shard"]
    if len(mesh.table) > 1:
        return DeviceMesh(device.type, mesh.table, mesh_dim_names=("replicas", "shard"))
    return DeviceMesh(device.type, mesh.table[0], mesh_dim_names=("shard",))


def _options(config: Config, device_mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Returns options of fully_shard(), for every unit."""
    on_host = config.shard.offload == "parameters"
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if on_host else OffloadPolicy()
    return {
        "mesh": device_mesh,
        "reshard_after_forward": config.shard.reshard,
        "offload_policy": offload,
    }


@torch.no_grad()
def _fill(
    unit: torch.nn.Module,
    filled: set[torch.nn.Module],
    deferred: Deferred | None,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Gives the modules of a unit that are not `filled` their memory on the device, with the
    numbers of rank 0, which each rank computes. A collective."""
    made: dict[int, torch.Tensor] = {}  # a tied parameter stays one

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        found = tensor.detach() if deferred is None else deferred.value(tensor)
        return as_on_rank_0(found.to(kind).contiguous(), mesh.world).to(device)

    for module in [module for module in unit.modules() if module not in filled]:
        filled.add(module)
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(whole(p), p.requires_grad)
                module._parameters[name] = made[id(p)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = whole(buffer)
        for name, tensor in vars(module).items():  # such as an unregistered mask
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and deferred is not None:
                setattr(module, name, whole(tensor))


def _order(config: Config, mesh: Mesh, device: torch.device) -> SameOrder:
    """Returns an object that compares the order of the units on all ranks."""
    fix = (
        "the same blocks on every rank: with a weight of 0, or chosen by what all ranks have; or "
        "shard.stage=2, where each rank may choose"
    )
    lags = runs_ahead(device, mesh.data)
    return SameOrder(mesh.data, mesh.world.rank, config.where("shard.stage"), fix, lags=lags)


class _Unit:
    """A block, or the model: its name, and which pass it is in."""

    def __init__(
        self, module: torch.nn.Module, name: str, order: SameOrder, *, gathers: bool
    ) -> None:
        """gathers: each rank has a part of the weights; otherwise only gradients are summed, over
        hosts with one rank each."""
        self._name = name
        self._order = order
        self._in_forward = False
        self._gathers = gathers
        module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's, which gathers
        module.register_forward_hook(self._end)  # after FSDP2's

    def gathers(self) -> None:
        self._order.ask(self._pass())

    def reduces(self) -> None:
        self._order.ask(f"reduction of the gradients of {self._name}")

    def _pass(self) -> str:
        if not in_backward():
            what = "forward pass"
        elif self._in_forward:
            what = "recomputation"
        else:
            what = "backward pass"
        return f"{what} of {self._name}"

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        self._in_forward = True
        self._order.at = self._pass()
        if not self._gathers:
            self.gathers()

    def _end(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._in_forward = False
        output = next(
            (
                leaf
                for leaf in tree_leaves(outputs)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ),
            None,
        )
        if output is not None:
            output.register_hook(self._go_back)

    def _go_back(self, gradient: torch.Tensor) -> None:
        """Runs after FSDP2's hook, which gathers this unit and prefetches another one."""
        self._order.at = self._pass()


class _AllGather(DefaultAllGather):
    """torch's implementation, called once all ranks are at the same unit."""

    def __init__(self, unit: _Unit, communicating: Communicating) -> None:
        self._unit = unit
        self._communicating = communicating

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        with self._communicating():
            self._unit.gathers()
            return super().__call__(*tensors, **options)


class _ReduceScatter(DefaultReduceScatter):
    """torch's implementation, called once all ranks are at the same unit."""

    def __init__(self, unit: _Unit, communicating: Communicating) -> None:
        self._unit = unit
        self._communicating = communicating

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        with self._communicating():
            self._unit.reduces()
            return super().__call__(*tensors, **options)


def _after_forward(
    sharded: Sequence[FSDPModule],
    orders: Sequence[SameOrder],
    communicating: Communicating,
    model: torch.nn.Module,
    inputs: Any,
    outputs: Any,
) -> None:
    """A forward hook: without shard.reshard whole weights stay until backward, but an evaluation
    has no backward pass."""
    with communicating():
        for order in orders:
            order.end("end of the forward pass", backward_follows=torch.is_grad_enabled())
    if not torch.is_grad_enabled():
        for module in sharded:
            module.reshard()


class Fsdp(Strategy):
    """Forward and backward gather the weights of each unit when they need them. Backward gives each
    rank the sum over ranks of its rows.

    With P bytes of weights and N ranks, Adam takes 4 P / N, plus the whole weights and gradients of
    the largest unit. Under autocast, gathered weights have 16 bits if layers compute in 16 bits
    (gathered_types.py).
    """

    waits_in_passes = gathers_in_passes = True

    def __init__(self, sharded: ShardedModel, on_host: bool) -> None:
        """on_host: the optimizer updates copies of the weights in host memory."""
        self._mesh = sharded.mesh
        self._model = sharded.model
        self._is_checked = False
        self.orders = sharded.orders
        mesh = sharded.mesh
        self._parts = {p: _held(p, mesh) for p in sharded.model.parameters()}
        self._shards = {
            p: _on_host(held) if on_host else held
            for p, held in self._parts.items()
            if p.requires_grad
        }
        self.summary = (
            f"weights sharded over {shard_summary(mesh)} {sharded.summary} (ZeRO stage 3)"
        )

    @property
    def equal_ranks(self) -> int:
        return self._mesh.world.size

    def class_name(self, model: torch.nn.Module) -> str:
        # fully_shard() has replaced the model's class by a subclass of it
        return type(model).__name__.removeprefix("FSDP")

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        return self._parts[p]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._mesh.shard, x)

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(
            forward,
            of_shards(
                optimizer, self._shards, self.total, self._mesh.shard.rank, self._mesh.shard.size
            ),
        )

    @torch.no_grad()
    def reduce(self) -> None:
        """Does not communicate: each backward has already added the sum over ranks to p.grad."""
        if not self._is_checked:  # after the first passes, in which FSDP2 sets itself up
            self._check_memory()
            self._is_checked = True
        for p, shard in self._shards.items():
            updated = shard.parameter
            updated.grad = (
                torch.zeros_like(updated)
                if p.grad is None
                else local_part(p.grad).to(updated.device)
            )
            p.grad = None

    def _check_memory(self) -> None:
        """Asserts that the model still uses the memory that the optimizer updates. If FSDP2 had
        replaced this memory, updates would silently not reach the model."""
        for name, p in self._model.named_parameters():
            assert p in self._parts, f"torch {torch.__version__} replaced the parameter {name}"
            kept = self._parts[p].parameter
            now = local_part(p)
            # not by addresses, which a forecast's tensors do not have
            assert (storage_of(now), now.storage_offset(), now.shape) == (
                storage_of(kept),
                kept.storage_offset(),
                kept.shape,
            ), f"torch {torch.__version__} moved the rows of {name} to other memory"

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._copy(self._shards, self._parts)

    def weights_changed(self) -> None:
        self._copy(self._parts, self._shards)

    @torch.no_grad()
    def _copy(
        self, source: dict[torch.nn.Parameter, Shard], target: dict[torch.nn.Parameter, Shard]
    ) -> None:
        """Copies weights if the optimizer updates copies of them."""
        for p in self._shards:
            if source[p] is not target[p]:
                target[p].parameter.copy_(source[p].parameter)


def _held(p: torch.nn.Parameter, mesh: Mesh) -> Shard:
    """Returns the memory of this rank's rows. The first ranks have equally many rows, the last
    ranks fewer or none."""
    rows = -(-len(p) // mesh.shard.size)
    first, last = (min(rank * rows, len(p)) for rank in (mesh.shard.rank, mesh.shard.rank + 1))
    per_row = p[:0].numel() if not len(p) else p.numel() // len(p)
    local = local_part(p)
    assert local.numel() == (last - first) * per_row, (local.numel(), first, last, per_row)
    return Shard(torch.nn.Parameter(local, p.requires_grad), p, first * per_row, last * per_row)


def _on_host(held: Shard) -> Shard:
    copy = torch.nn.Parameter(held.parameter.detach().to("cpu"))
    return held if copy.device == held.parameter.device else held._replace(parameter=copy)


def local_part(tensor: Any) -> torch.Tensor:
    """Returns (n,), the memory of a DTensor on this rank."""
    local: torch.Tensor = tensor.detach().to_local()
    return local.view(-1)
