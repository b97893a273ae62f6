"""A GPT-2-style decoder, as in frameworks/torch/models/gpt.py."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.frameworks.jax.layers import (
    OTHER_NUMBERS,
    Functions,
    Params,
    Wrap,
    as_it_is,
    dense,
    dropout,
    key_for,
    layer_norm,
    start_normal,
    start_norms,
)
from hvdtrain.frameworks.model_options import check_gpt

STD = 0.02


class StaticKVCache(NamedTuple):
    """The keys and values of one block for the positions read so far; later entries are
    undefined."""

    keys: Any  # (n, heads, context, width / heads)
    values: Any


@dataclass(frozen=True)
class GPT:
    """Tokens (n, m), m <= context -> logits (n, m, vocabulary) of the token after each."""

    context: int
    vocabulary: int
    layers: int
    heads: int
    width: int
    embedding_dropout: float
    attention_dropout: float
    residual_dropout: float
    tied: bool

    def init(self, key: jax.Array) -> Params:
        """Returns weights like init_weights() of the torch model: normal; biases 0, norms 1 and
        0."""
        stds = self._stds()
        biases = {
            f"{name}.bias": np.zeros(shape[0])
            for name, (shape, _) in stds.items()
            if "blocks." in name
        }
        norms = [
            "norm",
            *(f"blocks.{layer}.norm{i}" for layer in range(self.layers) for i in (1, 2)),
        ]
        return start_normal(key, stds) | biases | start_norms(dict.fromkeys(norms, self.width))

    def _stds(self) -> dict[str, tuple[tuple[int, int], float]]:
        """Returns layer -> shape and standard deviation of its weights."""
        width = self.width
        last = STD / math.sqrt(2 * self.layers)
        of_block = {
            "attention.inputs": ((3 * width, width), STD),
            "attention.output": ((width, width), last),
            "fc1": ((4 * width, width), STD),
            "fc2": ((width, 4 * width), last),
        }
        blocks = {
            f"blocks.{layer}.{name}": found
            for layer in range(self.layers)
            for name, found in of_block.items()
        }
        head = {} if self.tied else {"head": ((self.vocabulary, width), STD)}
        return {
            "tokens": ((self.vocabulary, width), STD),
            "positions": ((self.context, width), 0.01),
            **blocks,
            **head,
        }

    def apply(
        self, params: Params, tokens: jax.Array, wrap: Wrap = as_it_is, key: jax.Array | None = None
    ) -> jax.Array:
        x = dropout(key_for(key, 0), self._embed(params, tokens, 0), self.embedding_dropout)
        for layer in range(self.layers):
            x = wrap(layer, functools.partial(self._block, layer, key_for(key, layer + 1)))(
                params, x
            )
        return self._logits(params, x)

    def empty_cache(self, sequences: int, dtype: np.dtype) -> list[StaticKVCache]:
        shape = (sequences, self.heads, self.context, self.width // self.heads)
        return [
            StaticKVCache(np.zeros(shape, dtype), np.zeros(shape, dtype))
            for _ in range(self.layers)
        ]

    def read(
        self, params: Params, tokens: jax.Array, cache: list[StaticKVCache], first: Any
    ) -> tuple[jax.Array, list[StaticKVCache]]:
        """Evaluates apply() for positions from `first` on, with a cache of the earlier positions,
        so that only `tokens` are computed."""
        x = self._embed(params, tokens, first)
        found = []
        for layer, before in enumerate(cache):
            name = f"blocks.{layer}"
            queries, *new = self._parts(params, name, x)
            pairs = zip(before, new, strict=True)
            kept = StaticKVCache(
                *(
                    jax.lax.dynamic_update_slice_in_dim(old, part, first, axis=2)
                    for old, part in pairs
                )
            )
            x = self._after(params, name, x, self._mixed(queries, kept, first, None), None)
            found.append(kept)
        return self._logits(params, x), found

    def _embed(self, params: Params, tokens: jax.Array, first: jax.Array | int) -> jax.Array:
        """Embeds tokens (n, m) at positions from `first` on: (n, m, width)."""
        positions = jax.lax.dynamic_slice_in_dim(params["positions.weight"], first, tokens.shape[1])
        embedded: jax.Array = params["tokens.weight"][tokens] + positions
        return embedded

    def _logits(self, params: Params, x: jax.Array) -> jax.Array:
        weight: jax.Array = params["tokens.weight" if self.tied else "head.weight"]
        return layer_norm(params, "norm", x) @ weight.T

    def _block(self, layer: int, key: jax.Array | None, params: Params, x: jax.Array) -> jax.Array:
        """Attention, then two layers applied to each position; each of the two parts follows a norm
        and has a shortcut."""
        queries, keys, values = self._parts(params, f"blocks.{layer}", x)
        mixed = self._mixed(queries, StaticKVCache(keys, values), 0, key_for(key, 0))
        return self._after(params, f"blocks.{layer}", x, mixed, key)

    def _parts(self, params: Params, name: str, x: jax.Array) -> list[jax.Array]:
        """Returns queries, keys and values, (n, heads, m, width / heads) each."""
        n, m, width = x.shape
        # (n, m, 3 width)
        parts = dense(params, f"{name}.attention.inputs", layer_norm(params, f"{name}.norm1", x))
        return list(
            parts.reshape(n, m, 3, self.heads, width // self.heads).transpose(2, 0, 3, 1, 4)
        )

    def _mixed(
        self, queries: jax.Array, kept: StaticKVCache, first: jax.Array | int, key: jax.Array | None
    ) -> jax.Array:
        """Returns (n, m, width): each position from `first` on attends to itself and to all earlier
        positions."""
        n, heads, m, size = queries.shape
        seen = jnp.arange(kept.keys.shape[2]) <= first + jnp.arange(m)[:, None]
        scores = jnp.einsum("nhid,nhjd->nhij", queries, kept.keys) * size**-0.5
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum(
            "nhij,nhjd->nihd", dropout(key, shares, self.attention_dropout), kept.values
        )
        return mixed.reshape(n, m, heads * size)

    def _after(
        self, params: Params, name: str, x: jax.Array, mixed: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        """Computes the rest of a block, after attention."""
        x = x + dropout(
            key_for(key, 1), dense(params, f"{name}.attention.output", mixed), self.residual_dropout
        )
        hidden = jax.nn.gelu(
            dense(params, f"{name}.fc1", layer_norm(params, f"{name}.norm2", x)), approximate=True
        )
        return x + dropout(
            key_for(key, 2), dense(params, f"{name}.fc2", hidden), self.residual_dropout
        )


def build(
    name: str,
    context: int,
    vocabulary: int,
    *,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    embedding_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    residual_dropout: float = 0.0,
    tied: bool = False,
) -> Functions:
    """minGPT's model, for sequences of at most `context` tokens below `vocabulary`. GPT-2's
    smallest: layers 12, heads 12, width 768.

    layers: blocks of attention and two linear layers
    heads: parts of the width that attend by themselves
    width: numbers for each position
    embedding_dropout: share of the embeddings dropped in training, 0 to 1
    attention_dropout: share of the attention weights dropped in training, 0 to 1
    residual_dropout: share of what a block adds to its shortcuts dropped in training, 0 to 1
    tied: true: the last layer has the weights of the token embedding, as in GPT-2 (true or false)

    Raises UserError for sizes below 1, heads that do not divide the width, and a dropout outside of
    0 to 1.
    """
    check_gpt(
        layers,
        heads,
        width,
        embedding_dropout=embedding_dropout,
        attention_dropout=attention_dropout,
        residual_dropout=residual_dropout,
    )
    gpt = GPT(
        context,
        vocabulary,
        layers,
        heads,
        width,
        embedding_dropout,
        attention_dropout,
        residual_dropout,
        tied,
    )
    return Functions(
        gpt.init, gpt.apply, (OTHER_NUMBERS,), {"head.weight": "tokens.weight"} if tied else {}, gpt
    )
