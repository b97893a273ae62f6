"""model.name=gpt: equal to a decoder written down once more, causal, and the same with a cache as
without."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.models.gpt import GPT, build

CONTEXT = 12
VOCABULARY = 7
LAYERS = 3
HEADS = 2
WIDTH = 8


def model(**options: Any) -> GPT:
    torch.manual_seed(3)
    found = build(
        "gpt", CONTEXT, VOCABULARY, **{"layers": LAYERS, "heads": HEADS, "width": WIDTH, **options}
    ).double()
    assert isinstance(found, GPT)
    return found


def random_tokens(n: int, m: int = CONTEXT) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, VOCABULARY, (n, m)))


def by_hand(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The logits of one sequence, position by position and head by head, in NumPy."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * weights[f"{name}.weight"] + weights[
            f"{name}.bias"
        ]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    rows = [
        weights["tokens.weight"][token] + weights["positions.weight"][at]
        for at, token in enumerate(tokens)
    ]
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        parts = [
            np.split(linear(norm(x, f"{block}.norm1"), f"{block}.attention.inputs"), 3)
            for x in rows
        ]
        new_rows = []
        for at, x in enumerate(rows):
            heads = []
            for head in range(HEADS):
                own = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                scores = np.array(
                    [parts[at][0][own] @ parts[other][1][own] for other in range(at + 1)]
                ) / math.sqrt(WIDTH / HEADS)
                shares = np.exp(scores) / np.exp(scores).sum()
                heads.append(
                    sum(share * parts[other][2][own] for other, share in enumerate(shares))
                )
            between = x + linear(np.concatenate(heads), f"{block}.attention.output")
            h = linear(norm(between, f"{block}.norm2"), f"{block}.fc1")
            # Hendrycks, Gimpel 2016, arXiv:1606.08415
            h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            new_rows.append(between + linear(h, f"{block}.fc2"))
        rows = new_rows
    return np.stack([weights["head.weight"] @ norm(x, "norm") for x in rows])


def test_equal_to_the_formulas() -> None:
    gpt = model()
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # away from biases of 0 and norms of 1
    weights = {name: p.detach().numpy() for name, p in gpt.named_parameters()}
    tokens = random_tokens(2)
    for found, sequence in zip(gpt(tokens), tokens.numpy(), strict=True):
        np.testing.assert_allclose(
            found.detach().numpy(), by_hand(weights, sequence), rtol=0, atol=1e-12
        )


def test_a_position_does_not_see_those_after_it() -> None:
    gpt = model()
    tokens = random_tokens(1)
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % VOCABULARY
    before = gpt(tokens)[0]
    after = gpt(other)[0]
    assert torch.equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(1).all()


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 1, 5], [1, 3, 8]])
@pytest.mark.parametrize("training", [False, True])
def test_logits_with_a_cache_are_those_without(pieces: list[int], training: bool) -> None:
    """Single positions by GPTBlock.next(), or in training mode by the modules."""
    gpt = model().train(training)
    tokens = random_tokens(4)
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(torch.randn_like(p) * 0.3)  # away from biases of 0 and norms of 1
        whole = gpt(tokens)
        cache = gpt.empty_cache()
        parts = [gpt(part, cache) for part in tokens.split(pieces, 1)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12
    assert cache[0].length == CONTEXT


def test_the_first_weights_are_those_of_gpt_2() -> None:
    torch.manual_seed(0)
    gpt = build("gpt", 200, 300, layers=8, heads=2, width=128)
    stds = {name: float(p.detach().std()) for name, p in gpt.named_parameters() if p.ndim == 2}
    for name, std in stds.items():
        expected = (
            0.01
            if name == "positions.weight"
            else 0.02 / 4
            if name.endswith(("attention.output.weight", "fc2.weight"))
            else 0.02
        )
        assert std == pytest.approx(expected, rel=0.03), name
    for name, p in gpt.named_parameters():
        if p.ndim == 1:
            assert (p == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name


def weights_of(layers: int, width: int, context: int, vocabulary: int, tied: bool) -> int:
    return (
        (2 - tied) * vocabulary * width
        + context * width
        + layers * (12 * width**2 + 13 * width)
        + 2 * width
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_number_of_weights(tied: bool) -> None:
    assert weights_of(12, 768, 1024, 50257, tied=True) == 124_439_808  # GPT-2's smallest
    assert sum(p.numel() for p in model(tied=tied).parameters()) == weights_of(
        LAYERS, WIDTH, CONTEXT, VOCABULARY, tied
    )


def test_a_tied_head_learns_with_the_embedding() -> None:
    gpt = model(tied=True)
    assert (
        "head.weight" not in dict(gpt.named_parameters()) and gpt.head.weight is gpt.tokens.weight
    )
    logits = gpt(random_tokens(1))
    logits[0, -1, 3].backward()
    assert gpt.tokens.weight.grad is not None and (gpt.tokens.weight.grad[3] != 0).any()
    assert "head.weight" in dict(model().named_parameters())


@pytest.mark.parametrize("option", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_each_dropout_drops_in_training_alone(option: str) -> None:
    gpt = model(**{option: 0.5})
    tokens = random_tokens(2)
    assert not torch.equal(gpt(tokens), gpt(tokens))
    assert torch.equal(gpt.eval()(tokens), gpt(tokens))
    assert torch.equal(gpt(tokens), model().eval()(tokens))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"heads": 3}, "3 layers of 3 heads and width 8 are not valid"),
        ({"layers": 0}, "0 layers of 2 heads and width 8 are not valid"),
        ({"residual_dropout": 1.0}, "a dropout of 1.0 would drop everything"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        model(**options)
