"""A 64-bit hash of a tensor's bytes, computed on its device: a GPU sends eight bytes to the host
instead of the tensor.

It sums the 32-bit words, each times a random number for its position, modulo 2**64: multilinear
hashing (Lemire and Kaser 2012, arXiv:1202.4961, section 2), as in checkpoint/sums.py.
torch.hash_tensor() is the exclusive or of all elements. It does not detect permuted elements, or
another value in all elements of a constant tensor, such as the weights of a norm.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

# words at a time; the device holds 28 bytes for each meanwhile, and nothing afterwards
SPAN_WORDS = 2**18
_WORD_BYTES = 4


@torch.no_grad()
def sum_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the hash as int64 (), on the tensor's device; the host does not wait."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    words = data[:whole].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    spans = list(words.split(SPAN_WORDS)) if whole else []
    if whole < len(data):  # at most three bytes, filled up with zeros
        rest = data.new_zeros(_WORD_BYTES)
        rest[: len(data) - whole] = data[whole:]
        spans.append(rest.view(torch.int32))
    most = max((len(span) for span in spans), default=0)
    random_words = _random_words(SPAN_WORDS)[:most].to(tensor.device)
    for number, span in enumerate(spans):
        products = span.to(torch.int64).mul_(random_words[: len(span)])
        total += products.sum() * _odd(number)
    return total


@functools.cache
def _random_words(count: int) -> torch.Tensor:
    """Returns raw numbers of a counter-based generator in host memory, the same in each process."""
    return torch.from_numpy(np.random.Philox(key=0).random_raw(count).view(np.int64))


@functools.cache
def _odd(number: int) -> int:
    """Returns a random odd number for the words of a span, as a signed 64-bit number."""
    raw = np.random.Philox(key=number + 1).random_raw(1) | np.uint64(1)
    return int(raw.view(np.int64)[0])
