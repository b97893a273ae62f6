"""What a norm takes over from the one that it replaces, and the update of running statistics."""

from __future__ import annotations

import torch

from hvdtrain.frameworks.torch.private_api import BatchNorm


def take_over(new: BatchNorm, old: BatchNorm) -> None:
    """Moves the parameters, buffers and training mode of `old` to `new`."""
    new.weight = old.weight
    new.bias = old.bias
    new.running_mean = old.running_mean
    new.running_var = old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new.training = old.training


def update_running(
    norm: BatchNorm, means: torch.Tensor, variances: torch.Tensor, one_by_one: bool
) -> None:
    """Updates the running statistics with the statistics of S batches, (S, C): once with their
    mean, or once for each batch in order.

    With one update each, batch s has the final weight m (1 - m)^(S - 1 - s), and the old value (1 -
    m)^S. momentum=None is the mean over all updates so far, with equal weights.
    """
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    updates = len(means) if one_by_one else 1
    norm.num_batches_tracked += updates
    keep: float | torch.Tensor
    if one_by_one and norm.momentum is not None:
        # updates after each
        later = torch.arange(updates - 1, -1, -1, dtype=means.dtype, device=means.device)
        weights = norm.momentum * (1 - norm.momentum) ** later
        keep = (1 - norm.momentum) ** updates
    elif norm.momentum is not None:
        weights = means.new_full((len(means),), norm.momentum / len(means))
        keep = 1 - norm.momentum
    else:
        # on the device, because the host would have to wait for it
        share = updates / norm.num_batches_tracked.double()
        weights = (share / len(means)).to(means.dtype).expand(len(means))
        keep = 1 - share
    with torch.no_grad():
        norm.running_mean.mul_(keep).add_((weights.unsqueeze(1) * means).sum(0))
        norm.running_var.mul_(keep).add_((weights.unsqueeze(1) * variances).sum(0))
