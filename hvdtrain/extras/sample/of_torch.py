"""Draws sequences token by token from a torch model that caches what it has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.sample.generate import end_tokens, generate, longest
from hvdtrain.extras.sample.sampler import sampling_numbers
from hvdtrain.frameworks.torch.call import is_of_transformers
from hvdtrain.frameworks.torch.forward import Forward, InParts, whole_outputs
from hvdtrain.frameworks.torch.learner import TorchLearner
from hvdtrain.frameworks.torch.strategy import Strategy


def make_sampler(learner: TorchLearner, config: Config) -> TorchSampler:
    """Returns the sampler of a learner."""
    return TorchSampler(config, learner.model, learner.forward, learner.strategy)


class TorchSampler(NamedTuple):
    """Implements Sampler with the model of a TorchLearner."""

    config: Config
    model: torch.nn.Module
    forward: Forward
    strategy: Strategy

    def continue_sequences(
        self,
        prompts: np.ndarray,
        length: int,
        *,
        tokens: int,
        temperature: float,
        top_k: int | None = None,
        seed: int,
        first: int,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        is_of_library = is_of_transformers(self.model)
        if is_of_library:
            self._check_generate()
            self._check_length(length)
        elif not hasattr(self.model, "empty_cache"):
            what = (
                f"{type(self.model).__name__} has no empty_cache(), so it cannot generate token "
                "by token"
            )
            raise UserError(
                what,
                self.config.where("model.name"),
                "a run with model.name=gpt or a model of transformers",
            )
        self.model.eval()
        model: Any = self.model
        keeps_up = self.strategy.gathers_in_passes and not len(prompts)
        begun = np.zeros((1, prompts.shape[1]), np.int64) if keeps_up else prompts
        device = self.forward.inputs.device
        choice = TokenChoice(tokens, temperature, top_k, seed, first)
        started = torch.from_numpy(begun).to(device)
        with self.forward.precision.autocast(device), torch.inference_mode():
            if is_of_library:
                # a rank may not end earlier than others that gather weights in their passes
                ends = () if self.strategy.gathers_in_passes else self.end_tokens
                sequences = by_library(model, started, length, choice, ends, before_each)
            else:
                sequences = token_by_token(model, started, length, choice, before_each)
        return sequences[: len(prompts)].cpu().numpy()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text of a model of transformers."""
        return end_tokens(self.model) if is_of_transformers(self.model) else ()

    @property
    def longest(self) -> int | None:
        """The most tokens of a text that a model of transformers draws; None if there is no
        limit."""
        return longest(self.model) if is_of_transformers(self.model) else None

    def _check_generate(self) -> None:
        if not self.model.can_generate():  # type: ignore[operator]
            what = f"{type(self.model).__name__} of transformers has no generate()"
            fix = "a run with a class for language models, as in transformers:AutoModelForCausalLM"
            raise UserError(what, self.config.where("model.name"), fix)

    def _check_length(self, length: int) -> None:
        most = self.longest
        if most is not None and length > most:
            what = (
                f"{type(self.model).__name__} has positions for {most - 1:,} tokens, but "
                f"{length:,} were asked for"
            )
            raise UserError(what, "--length", f"a prompt and --length of at most {most:,} together")


class IncrementalDecoder(Protocol):
    """A model that can read a sequence a few positions at a time, as models/gpt.py."""

    context: int

    def __call__(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor | InParts:
        """Returns int64 (n, m) of further positions -> logits (n, m, vocabulary)."""

    def empty_cache(self) -> Any:
        """Returns an empty cache with `context` positions, for any sequences."""


class TokenChoice(NamedTuple):
    """How the tokens of some sequences are drawn."""

    tokens: int  # 0 ... tokens - 1
    temperature: float
    top_k: int | None
    seed: int
    first: int  # number of the first sequence

    def numbers(self, sequences: int, length: int) -> torch.Tensor:
        """Returns the random numbers of each position, float64 (sequences, length)."""
        rows = self.first + np.arange(sequences)
        return torch.from_numpy(sampling_numbers(self.seed, rows, np.arange(length)))

    def draw(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns a token for each row of logits (n, outputs) by inversion of the cumulative
        distribution, int64 (n,). numbers: float64 (n,)."""
        logits = logits[:, : self.tokens].double()
        if self.top_k is not None and self.top_k < self.tokens:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.temperature == 0:
            return logits.argmax(1)
        cumulative = (logits / self.temperature).softmax(1).cumsum(1)
        chosen = (numbers * cumulative[:, -1])[:, None]
        drawn = torch.searchsorted(cumulative, chosen, right=True)[:, 0]
        return drawn.clamp(max=logits.shape[1] - 1)


def continue_sequences(
    model: IncrementalDecoder,
    prompts: torch.Tensor,
    length: int,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int,
    first: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Returns the prompts, int64 (n, m) with m >= 1, continued by the model to int64 (n, length).
    Tokens are 0 ... tokens - 1. The model must be in evaluation mode.

    Each token is drawn from softmax(logits / temperature); with temperature 0 it is the most
    probable token, and with top_k it is one of the top_k most probable ones. The random number of
    position t of sequence i is fold(seed, first + i, t): a sequence does not depend on the batch
    that it is drawn in, up to rounding of the logits. Beyond the context the model reads the second
    half of its context again and continues from there. before_each() is called before each
    position.
    """
    choice = TokenChoice(tokens, temperature, top_k, seed, first)
    return token_by_token(model, prompts, length, choice, before_each)


@torch.inference_mode()
def token_by_token(
    model: IncrementalDecoder,
    prompts: torch.Tensor,
    length: int,
    choice: TokenChoice,
    before_each: Callable[[], None],
) -> torch.Tensor:
    """Does what continue_sequences() says."""
    n = len(prompts)
    sequences = torch.cat([prompts, prompts.new_zeros(n, length - prompts.shape[1])], 1)
    numbers = choice.numbers(n, length).to(prompts.device)
    # the cache has positions begin ... read - 1
    cache = model.empty_cache()
    begin = 0
    read = 0
    for at in range(prompts.shape[1], length):
        before_each()
        if not n:  # other ranks have the sequences
            continue
        if at - begin > model.context:
            begin = read = at - max(1, model.context // 2)
            cache = model.empty_cache()
        logits = whole_outputs(model(sequences[:, read:at], cache))[:, -1]  # (n, outputs)
        read = at
        sequences[:, at] = choice.draw(logits, numbers[:, at])
    return sequences


def by_library(
    model: Any,
    prompts: torch.Tensor,
    length: int,
    choice: TokenChoice,
    ends: Sequence[int],
    before_each: Callable[[], None],
) -> torch.Tensor:
    """Does what continue_sequences() says with generate() of transformers. A sequence with one of
    the tokens `ends` is filled with that token."""
    n, at_first = prompts.shape
    numbers = choice.numbers(n, length).to(prompts.device)
    waiting = length - at_first  # positions before which before_each() is still to be called

    def draw(logits: torch.Tensor, at: int) -> torch.Tensor:
        nonlocal waiting
        waiting -= 1
        before_each()
        return choice.draw(logits, numbers[:, at])

    sequences = generate(model, prompts, length, draw, ends) if n and waiting else prompts
    for _ in range(waiting):  # as often as on the other ranks
        before_each()
    filled = sequences[:, -1:].expand(n, length - sequences.shape[1])
    return torch.cat([sequences, filled], 1)
