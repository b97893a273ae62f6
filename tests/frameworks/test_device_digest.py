"""The sum of a tensor's bytes that a GPU computes: by hand, and what it notices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdtrain.core.arrays import Piece, digests_of_pieces
from hvdtrain.frameworks.torch import device_digest
from hvdtrain.frameworks.torch.device_digest import sum_of_bytes

CPU = torch.device("cpu")


def by_hand(data: bytes) -> int:
    """With integers of any size."""
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), "<i4").tolist()
    whole = len(data) // 4
    table = device_digest._random_words(device_digest.SPAN_WORDS).tolist()
    per_span = device_digest.SPAN_WORDS
    total = 0
    for place, word in enumerate(words):
        # the bytes that fill no word are a span of their own
        span, inside = divmod(place, per_span) if place < whole else (-(-whole // per_span), 0)
        total += word * table[inside] * device_digest._odd(span)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 40])
def test_it_is_the_sum_over_words(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_digest, "SPAN_WORDS", 8)
    generator = torch.Generator().manual_seed(count)
    numbers = (torch.rand(2, count + 1, generator=generator) * 200).to(dtype)
    for tensor in (numbers, numbers[1, 1:], numbers.T, numbers[0, 0]):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert int(sum_of_bytes(tensor)) == by_hand(data)


def test_it_notices_flipped_bits_swapped_elements_and_another_constant() -> None:
    """The exclusive or of all elements notices the first alone."""
    ones = torch.ones(64)
    numbers = torch.arange(64.0)
    swapped = numbers.clone()
    swapped[[3, 9]] = numbers[[9, 3]]
    flipped = numbers.clone()
    flipped.view(torch.int32)[5] ^= 1
    found = [ones, 0.5 * ones, numbers, swapped, flipped, torch.zeros(64)]
    assert len({int(sum_of_bytes(tensor)) for tensor in found}) == len(found)


def test_a_digest_has_the_type_and_the_shape() -> None:
    def digest(shape: tuple[int, ...], dtype: str, number: int) -> int:
        def read() -> np.ndarray:
            raise AssertionError("only the digest comes to the host")

        count = int(np.prod(shape))
        piece = Piece("p.w", shape, 0, count, np.dtype(dtype), read, True)
        return digests_of_pieces([("p.w", piece._replace(hash_in_place=lambda: number))])["p.w"]

    forms = [((2, 3), "<f4", 1), ((3, 2), "<f4", 1), ((2, 3), "<i4", 1), ((2, 3), "<f4", -1)]
    assert len({digest(*form) for form in forms}) == len(forms)
