"""Sampling: the same sequences as without a cache, in whatever batch; the shares that the model
says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hvdtrain.core.progress import fold
from hvdtrain.extras.sample.of_torch import continue_sequences
from hvdtrain.frameworks.torch.models.gpt import GPT, build


def model(context: int, vocabulary: int = 9, layers: int = 2, width: int = 16) -> GPT:
    torch.manual_seed(1)
    found = build("gpt", context, vocabulary, layers=layers, heads=2, width=width).double().eval()
    assert isinstance(found, GPT)
    with torch.no_grad():
        for p in found.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return found


@torch.no_grad()
def without_cache(
    gpt: GPT, prompts: torch.Tensor, length: int, tokens: int, temperature: float, seed: int
) -> torch.Tensor:
    """The definition: the whole sequence is read for every token."""
    found = prompts
    for at in range(prompts.shape[1], length):
        shares = (gpt(found)[:, -1, :tokens] / temperature).softmax(1).numpy()
        drawn = []
        for row, share in enumerate(shares):
            u = (fold(seed, 0x73616D70, row, at) >> 11) / 2**53
            drawn.append(int(np.searchsorted(np.cumsum(share), u, side="right")))
        found = torch.cat([found, torch.tensor(drawn)[:, None]], 1)
    return found


def test_the_sequences_are_those_without_a_cache() -> None:
    gpt = model(20)
    prompts = torch.tensor([[8, 1], [8, 2], [8, 3]])
    found = continue_sequences(gpt, prompts, 21, tokens=8, temperature=0.7, seed=4)
    assert torch.equal(found, without_cache(gpt, prompts, 21, 8, 0.7, 4))
    assert found[:, 2:].max() < 8
    assert len({tuple(row) for row in found[:, 2:].tolist()}) == 3
    assert torch.equal(
        continue_sequences(gpt, prompts[1:], 21, tokens=8, temperature=0.7, seed=4, first=1),
        found[1:],
    )
    assert not torch.equal(
        continue_sequences(gpt, prompts, 21, tokens=8, temperature=0.7, seed=5), found
    )


def test_a_rank_without_sequences_keeps_in_step() -> None:
    calls: list[int] = []
    prompts = torch.zeros(2, 3, dtype=torch.int64)
    options = {"tokens": 8, "temperature": 1.0, "seed": 1}
    for part in (prompts, prompts[:0]):
        found = continue_sequences(
            model(6), part, 12, **options, before_each=lambda: calls.append(0)
        )  # type: ignore[arg-type]
        assert found.shape == (len(part), 12)
    assert len(calls) == 2 * 9


def test_temperature_0_takes_the_most_probable() -> None:
    gpt = model(20)
    prompts = torch.tensor([[0, 1], [3, 3]])
    found = continue_sequences(gpt, prompts, 20, tokens=9, temperature=0, seed=1)
    with torch.no_grad():
        assert torch.equal(gpt(found)[:, 1:-1].argmax(2), found[:, 2:])


def test_tokens_are_as_frequent_as_the_model_says() -> None:
    gpt = model(4)
    n = 20_000
    with torch.no_grad():
        shares = (gpt(torch.tensor([[5]]))[0, -1] / 2.0).softmax(0).numpy()
    drawn = continue_sequences(gpt, torch.full((n, 1), 5), 2, tokens=9, temperature=2.0, seed=3)[
        :, 1
    ].numpy()
    counts = np.bincount(drawn, minlength=9)
    assert (
        (counts - n * shares) ** 2 / (n * shares)
    ).sum() < 31.8  # chi-square of 8 degrees of freedom, 1 in 10,000


def test_beyond_the_context_the_second_half_is_read_again() -> None:
    gpt = model(6)
    prompts = torch.tensor([[1], [2]])
    found = continue_sequences(gpt, prompts, 12, tokens=9, temperature=0, seed=1)
    expected = prompts
    begin = 0
    with torch.no_grad():
        for at in range(1, 12):
            begin = at - 3 if at - begin > 6 else begin
            expected = torch.cat([expected, gpt(expected[:, begin:])[:, -1:].argmax(2)], 1)
    assert torch.equal(found, expected)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The time of the processor has what threads spend on waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.clock
def test_32_images_are_drawn_ten_times_as_fast_with_the_cache(one_thread: None) -> None:
    """In 0.4 s of the processor, instead of 9."""
    gpt = model(256, 65, layers=2, width=64).float()
    prompts = torch.full((32, 1), 64)
    began_s = time.process_time()
    found = continue_sequences(gpt, prompts, 257, tokens=64, temperature=1.0, seed=2)
    cached_s = time.process_time() - began_s
    began_s = time.process_time()
    with torch.no_grad():
        for at in range(
            1, 257, 8
        ):  # every eighth token, which is a little less than an eighth of the work
            gpt(found[:, :at])
    assert 8 * (time.process_time() - began_s) > 10 * cached_s
