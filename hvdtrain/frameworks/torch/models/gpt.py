"""A GPT-2-style decoder: reads tokens and predicts the next token at each position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.frameworks.model_options import check_gpt
from hvdtrain.frameworks.torch.call import positions_of
from hvdtrain.frameworks.torch.pipeline_unit import Unit

STD = 0.02


@dataclass(eq=False)
class KVCache:
    """The keys and values of the positions that a block has read: the filled part of two buffers.

    Keys lie by columns, as the queries of one position multiply them.
    """

    context: int
    # the block's parameters, for GPTBlock.next(); empty if they are partitioned
    weights: tuple[torch.Tensor, ...]
    length: int = 0  # positions that were read
    keys: torch.Tensor | None = None  # (n heads, width / heads, context)
    values: torch.Tensor | None = None  # (n heads, context, width / heads)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of further positions, (n heads, m, width / heads) each; returns
        the filled parts of the buffers."""
        if self.keys is None or self.values is None:
            rows, _, width = keys.shape
            self.keys = keys.new_empty(rows, width, self.context)
            self.values = values.new_empty(rows, self.context, width)
        first = self.length
        self.length = self.length + keys.shape[1]
        self.keys[:, :, first : self.length] = keys.transpose(1, 2)
        self.values[:, first : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, : self.length]


class Attention(nn.Module):
    """Causal multi-head attention: each position attends to itself and to earlier positions
    (Vaswani et al. 2017, arXiv:1706.03762, 3.2)."""

    def __init__(
        self, width: int, heads: int, attention_dropout: float, residual_dropout: float
    ) -> None:
        super().__init__()
        self.head_size = width // heads
        self.attention_dropout = attention_dropout
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(residual_dropout)

    def forward(
        self, x: torch.Tensor, cache: KVCache | None, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        # (n, m, 3 heads head_size); x may have fewer positions, with parallel.sequence
        inputs = self.inputs(x)
        n, m, _ = inputs.shape
        # with tensor parallelism, the heads of this rank
        heads = inputs.shape[2] // (3 * self.head_size)
        queries, keys, values = (
            part.view(n, m, heads, -1).transpose(1, 2) for part in inputs.chunk(3, 2)
        )
        dropout = self.attention_dropout if self.training else 0.0
        if cache is not None:
            first = cache.length
            # (n, heads, width / heads, first + m), (n, heads, first + m, width / heads)
            keys, values = (
                part.unflatten(0, (n, heads))
                for part in cache.append(keys.flatten(0, 1), values.flatten(0, 1))
            )
            keys = keys.transpose(2, 3)
            seen = (
                torch.ones(m, first + m, dtype=torch.bool, device=x.device).tril(first)
                if first
                else None
            )
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, seen, dropout, is_causal=seen is None
        )
        return self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))


class GPTBlock(nn.Module):
    """Attention, then two layers applied to each position; each of the two parts follows a norm and
    has a shortcut, as in GPT-2."""

    def __init__(
        self, width: int, heads: int, attention_dropout: float, residual_dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention_dropout, residual_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(residual_dropout)

    def forward(
        self, x: torch.Tensor, cache: KVCache | None = None, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """seen: bool (n, 1, m, m), the positions that each one attends to; None: itself and all
        earlier ones."""
        x = x + self.attention(self.norm1(x), cache, seen)
        return x + self.dropout(
            self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        )

    def next(self, x: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Runs forward() for one more position in evaluation mode: (n, width) -> (n, width).

        It takes the weights from the cache, because looking them up in modules and calling these
        would take a fifth of the time of a small model.
        """
        (
            norm1,
            norm1_bias,
            inputs,
            inputs_bias,
            output,
            output_bias,
            norm2,
            norm2_bias,
            fc1,
            fc1_bias,
            fc2,
            fc2_bias,
        ) = cache.weights
        n, width = x.shape
        heads = width // self.attention.head_size
        # (n, 3 width)
        parts = functional.linear(
            torch.layer_norm(x, (width,), norm1, norm1_bias), inputs, inputs_bias
        )
        queries, keys, values = (
            parts.view(n, 3, width).transpose(0, 1).reshape(3, n * heads, 1, width // heads)
        )
        keys, values = cache.append(keys, values)
        scores = torch.bmm(queries, keys) * queries.shape[2] ** -0.5  # (n heads, 1, length)
        x = x + functional.linear(
            torch.bmm(scores.softmax(2), values).view(n, width), output, output_bias
        )
        hidden = functional.linear(torch.layer_norm(x, (width,), norm2, norm2_bias), fc1, fc1_bias)
        return x + functional.linear(functional.gelu(hidden, approximate="tanh"), fc2, fc2_bias)


class GPT(nn.Module):
    """Tokens (n, m), m <= context -> logits (n, m, vocabulary) of the token after each."""

    def __init__(
        self,
        context: int,
        vocabulary: int,
        *,
        layers: int,
        heads: int,
        width: int,
        embedding_dropout: float,
        attention_dropout: float,
        residual_dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(embedding_dropout)
        self.blocks = nn.ModuleList(
            GPTBlock(width, heads, attention_dropout, residual_dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        init_weights(self)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        tokens: torch.Tensor,
        cache: list[KVCache] | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the logits of `tokens`. With the cache from empty_cache(), tokens are the
        positions after the cached ones, which are not computed again.

        segments: int64 (n, m), equal for tokens of the same sequence, if rows contain several
        sequences (data.pack); sequences do not affect each other.
        """
        if segments is not None:
            assert cache is None
            return self._of_segments(tokens, segments)
        first = cache[0].length if cache else 0
        m = tokens.shape[1]
        assert first + m <= self.context, (first, m, self.context)
        if cache and cache[0].weights and m == 1 and not self.training:
            return self._next(tokens[:, 0], cache)[:, None]
        x = self._embed(tokens, first)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache[layer] if cache else None)
        return self._logits(x)

    def _of_segments(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Runs forward() for rows with several sequences. Positions count from the first token of
        each sequence, and no sequence attends to another."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions_of(segments)  # (n, m)
        # (n, 1, m, m)
        seen = ((segments[:, :, None] == segments[:, None]) & (at[:, None] >= at))[:, None]
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, None, seen)
        return self._logits(x)

    def pipeline_units(self) -> list[Unit]:
        """Returns forward() without a cache as functions of one tensor: the embeddings, each block,
        and the logits."""
        blocks = [Unit(f"blocks.{i}", (block,), block) for i, block in enumerate(self.blocks)]
        embed = Unit("embeddings", (self.tokens, self.positions, self.dropout), self._embed)
        return [embed, *blocks, Unit("head", (self.norm, self.head), self._logits)]

    def _embed(self, tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Embeds tokens (n, m) at positions from `first` on: (n, m, width)."""
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(positions))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))

    def _next(self, tokens: torch.Tensor, cache: list[KVCache]) -> torch.Tensor:
        """Returns the logits (n, vocabulary) after one more position, tokens (n,)."""
        x = self.tokens(tokens) + self.positions.weight[cache[0].length]  # (n, width)
        for block, kept in zip(self.blocks, cache, strict=True):
            x = block.next(x, kept)  # type: ignore[operator]  # it is a GPTBlock
        return self.head(self.norm(x))

    def empty_cache(self) -> list[KVCache]:
        """Returns a cache for each layer, to run forward() a few positions at a time; it holds
        `context` positions."""
        is_whole = (
            all(type(p) is nn.Parameter for p in self.parameters()) and type(self.head) is nn.Linear
        )
        return [
            KVCache(self.context, tuple(block.parameters()) if is_whole else ())
            for block in self.blocks
        ]

    def tensor_plan(self) -> dict[str, str]:
        """Returns how tensor parallelism partitions layers
        (docs/parallel.md): by heads, hidden neurons, tokens."""
        block = self.blocks[0]
        assert isinstance(block, GPTBlock)
        by_heads = f"by {block.attention.head_size}"
        return {
            "tokens": "vocabulary",
            "positions": "sequence",
            "*norm*": "sequence",
            "blocks.*.attention.inputs": f"columns of 3 {by_heads}",
            "blocks.*.attention.output": f"rows {by_heads}",
            "blocks.*.fc1": "columns",
            "blocks.*.fc2": "rows",
            "head": "vocabulary",
        }

    def context_plan(self) -> dict[str, str]:
        """Returns which modules mix positions or number them, if ranks divide the positions
        (docs/parallel.md)."""
        return {"blocks.*.attention": "attention", "positions": "positions"}


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Initializes weights like OpenAI's GPT-2 (github.com/openai/gpt-2, src/model.py): N(0,
    0.02^2), positions N(0, 0.01^2), biases 0, norms 1 and 0.

    The layers that end a shortcut, 2 for each block, have 0.02 / sqrt(2 layers) (Radford et al.
    2019, "Language Models are Unsupervised Multitask Learners", 2.3). minGPT and nanoGPT use 0.02
    for positions, too; minGPT's image notebook does not scale by the depth.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.positions.weight, std=0.01)
    for name, weight in model.blocks.named_parameters():
        if name.endswith(("attention.output.weight", "fc2.weight")):
            nn.init.normal_(weight, std=STD / math.sqrt(2 * len(model.blocks)))


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
) -> nn.Module:
    """minGPT's model, for sequences of at most `context` tokens below `vocabulary`. GPT-2's
    smallest: layers 12, heads 12, width 768.

    In order: the embeddings of token and position, added; layers of attention
    (scaled_dot_product_attention, causal) and of two linear layers with GELU (its tanh form), each
    after a LayerNorm (eps 1e-5) and with a shortcut; a last LayerNorm; logits without a bias. All
    other linear layers and the norms have biases.

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
    return GPT(
        context,
        vocabulary,
        layers=layers,
        heads=heads,
        width=width,
        embedding_dropout=embedding_dropout,
        attention_dropout=attention_dropout,
        residual_dropout=residual_dropout,
        tied=tied,
    )
