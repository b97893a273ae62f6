"""Tensors are cast for the wire, and cast back."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """compress() gives the tensor for the wire, and what decompress() needs."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Cast):
    """Floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor, tensor.dtype


class BF16Compressor(_Cast):
    """Floating-point tensors as bfloat16: the range of float32 with 8 bits of precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point else tensor, tensor.dtype


class Compression:
    """What allreduce() and DistributedOptimizer() take as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
