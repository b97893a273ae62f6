"""What the loss of a step is divided by: the samples of the global batch, or its tokens."""

from __future__ import annotations

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.tasks.task import Task


def global_weight(task: Task, own: int, batch: int, communicator: Communicator) -> int:
    """The sum of Task.weight() over the `batch` samples of a step, of which this rank's samples weigh `own`.

    Where all samples weigh the same no rank asks the others. Else it is one small allreduce before the first backward pass, a collective:
    every gradient is then divided once, by the exact number, whatever strategy reduces it. (Dividing after the reduction would be a second
    pass over all gradients, with clipping, noise scale and local steps to be told of it.)
    """
    if task.sample_weight is not None:
        return batch * task.sample_weight
    total = communicator.allreduce(np.array([float(own)]), "step.weight")  # exact: float64 has every whole number up to 2**53
    return max(1, round(float(total[0])))
