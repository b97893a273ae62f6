"""shard.stage=3 of a script's own model: each rank keeps its rows of every weight, and the optimizer follows."""

from __future__ import annotations

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.process_group import start_process_group
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.own_loop.prepared_optimizer import WHERE
from hvdtrain.frameworks.torch.parallel.fsdp import Fsdp, device_mesh, shard_model


def shard_given(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config, mesh: Mesh, device: torch.device) -> Fsdp:
    """Cuts the model's weights in place, with those of rank 0, and gives the optimizer the parameters that the model has then.

    Every rank calls it. Raises UserError for a compiled model, parameters of several number types, and one that is a single number.
    """
    if hasattr(model, "_orig_mod"):
        fix = "torch.compile() of the layers inside, or shard.stage=2"
        raise UserError("a compiled model would keep whole weights, which shard.stage=3 cuts", WHERE, fix)
    types = {p.dtype for p in model.parameters()}
    if len(types) > 1:
        what = f"the model's parameters are of {', '.join(sorted(map(str, types)))}: shard.stage=3 gathers those of one type"
        raise UserError(what, WHERE, "model.to(torch.float32), and torch.autocast for what computes in 16 bits; or shard.stage=2")
    if "ddp" not in mesh.world.features:
        start_process_group(mesh.world)
    names = {p: name for name, p in model.named_parameters()}
    sharded = shard_model(model, None, config, mesh, device_mesh(mesh, device), device, types.pop())
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [now[names[p]] for p in group["params"]]
    return sharded.strategy(config)
