"""What each unit takes at which a pipeline may cut a model, as measured in this process."""

from __future__ import annotations

import os

import torch

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.schema import Config
from hvdtrain.core.seeds import fold
from hvdtrain.frameworks.torch.device import pick_device
from hvdtrain.frameworks.torch.model import check_outputs, example, normed_model
from hvdtrain.frameworks.torch.parallel.pipeline.measured import own_seconds
from hvdtrain.frameworks.torch.parallel.pipeline.pipelined import operations_of, refuse_changed_buffers
from hvdtrain.frameworks.torch.parallel.pipeline.schedule import UnitCost
from hvdtrain.frameworks.torch.parallel.pipeline.stages import units_of
from hvdtrain.frameworks.torch.precision import pick_precision
from hvdtrain.tasks.task import Task


def unit_costs(config: Config, task: Task, samples: int) -> list[UnitCost]:
    """Costs of the units of the job's model, with `samples` samples, in this process. Raises UserError for a model that a pipeline refuses.

    Computes with as many threads as a rank has where all ranks that have the model share this machine.
    """
    alone, threads = SingleProcessCommunicator(), torch.get_num_threads()
    device = pick_device(config, alone)
    precision = pick_precision(config, device, alone)
    torch.manual_seed(fold(config.seed) & (2**63 - 1))
    model = normed_model(config, task, alone).to(device=device, dtype=precision.weights)
    like = torch.empty(0, dtype=precision.weights, device=device)
    check_outputs(model, config, task, like)
    where = config.where("parallel.pipeline")
    units = units_of(model, where)
    refuse_changed_buffers(model, example(2, config, task, like), where)
    operations = operations_of(units, model, example(samples, config, task, like), where)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads // config.parallel.ranks))
    try:
        seconds = own_seconds(units, example(samples, config, task, like), precision.autocast)
    finally:
        torch.set_num_threads(threads)
    return [UnitCost(unit.name, flops, each) for unit, flops, each in zip(units, operations, seconds, strict=True)]
