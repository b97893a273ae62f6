"""Ops of the torch framework: one call works on the arrays of many parameters, in place."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.optim.rule import newton_schulz

Arrays = list[torch.Tensor]  # of one dtype on one device
Row = torch.Tensor  # (n,), one number for each of n parameters


class TorchOps:
    """A rule's arithmetic over lists of tensors. Call it under torch.no_grad(). A Row never goes to the host: nothing waits for a GPU.

    A Row as a factor costs one kernel for each parameter on a GPU, where a Python number costs one for many.
    """

    def zeros_like(self, x: Arrays) -> Arrays:
        return [torch.zeros_like(t) for t in x]

    def zero(self, x: Arrays) -> Row:
        return torch.zeros(len(x), dtype=x[0].dtype, device=x[0].device)

    def copy(self, x: Arrays) -> Arrays:
        return [t.clone() for t in x]

    def scale(self, a: Row | float, Y: Arrays) -> Arrays:
        if isinstance(a, torch.Tensor):
            torch._foreach_mul_(Y, a.unbind())
        elif a != 1:
            torch._foreach_mul_(Y, a)
        return Y

    def axpy(self, a: Row | float, x: Arrays, Y: Arrays) -> Arrays:
        if isinstance(a, torch.Tensor):
            torch._foreach_addcmul_(Y, x, a.unbind())
        elif a != 0:
            torch._foreach_add_(Y, x, alpha=a)
        return Y

    def addcmul(self, a: float, x: Arrays, z: Arrays, Y: Arrays) -> Arrays:
        torch._foreach_addcmul_(Y, x, z, value=a)
        return Y

    def divide_by_sqrt(self, x: Arrays, v: Arrays, eps: float) -> Arrays:
        below = torch._foreach_sqrt(v)
        torch._foreach_add_(below, eps)
        return list(torch._foreach_div(x, below))

    def norm(self, x: Arrays) -> Row:
        if all(t.device.type == "cpu" and t.is_contiguous() for t in x):
            return torch.stack([torch.dot(t.view(-1), t.view(-1)) for t in x]).sqrt()  # on two cores half the time of vector_norm
        return torch.stack(torch._foreach_norm(x))

    def orthogonalize(self, x: Arrays, p: Arrays, rounds: int, eps: float, dtype: str) -> Arrays:
        assert all(t.ndim >= 2 for t in x), [tuple(t.shape) for t in x]  # a flattened part of a matrix would give wrong numbers
        alike: dict[torch.Size, list[int]] = {}
        for i, t in enumerate(x):
            alike.setdefault(t.flatten(1).shape, []).append(i)
        found = list(x)
        for members in alike.values():
            stack = torch.stack([x[i].flatten(1) for i in members]).to(getattr(torch, dtype) if dtype else None)  # (n, out, in kh kw)
            norms = stack.flatten(1).norm(dim=1).view(-1, 1, 1)
            for i, matrix in zip(members, newton_schulz(stack, rounds, eps, norms), strict=True):
                found[i] = matrix.to(x[i].dtype).reshape(x[i].shape)
        return found

    def where(self, condition: torch.Tensor, a: Row | float, b: Row | float) -> Row:
        assert isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor), f"{a}, {b}: torch would make their dtype the default one"
        return torch.where(condition, a, b)

    def sqrt(self, a: Row) -> Row:
        return a.sqrt()


def unstack(entry: Any) -> Arrays:
    """One tensor for each parameter, 0-d where the entry of the state is a Row."""
    return list(entry.unbind()) if isinstance(entry, torch.Tensor) else entry
