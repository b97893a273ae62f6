"""Tensors are cast for the wire, and cast back."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.horovod.call import as_torch


class Compressor:
    """compress() gives the tensor for the wire, and what decompress() needs."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """A tensor is sent as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Floating-point tensors and arrays; others stay what they are."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if isinstance(tensor, torch.Tensor):
            return tensor.to(cls.wire) if tensor.dtype.is_floating_point else tensor, tensor.dtype
        host, back = as_torch(tensor, "compression")
        return (host.to(cls.wire), (host.dtype, back)) if host.dtype.is_floating_point else (tensor, host.dtype)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        if isinstance(ctx, torch.dtype):
            return tensor.to(ctx) if ctx.is_floating_point else tensor
        dtype, back = ctx
        return back(tensor.to(dtype))


class FP16Compressor(_Cast):
    """A tensor is sent as float16."""

    wire = torch.float16


class BF16Compressor(_Cast):
    """A tensor is sent as bfloat16: the range of float32 with 8 bits of precision."""

    wire = torch.bfloat16


class Compression:
    """What allreduce() and DistributedOptimizer() take as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
