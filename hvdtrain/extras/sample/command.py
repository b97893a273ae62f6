"""hvdtrain sample: generates images or text with the model of a run, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.extras import token_images
from hvdtrain.core.folder import Folder
from hvdtrain.data.configured.opened import plugin_of
from hvdtrain.data.configured.unwritten import unstaged
from hvdtrain.data.datasets.text import decode
from hvdtrain.data.field import Field
from hvdtrain.data.sampler import permutation
from hvdtrain.data.source import Pictures
from hvdtrain.errors import DONE, UserError, short
from hvdtrain.extras.sample.grid import grid
from hvdtrain.extras.sample.prompt import read_prompt
from hvdtrain.extras.sample.sampler import Sampler, draw_on_all_ranks, sampler_of
from hvdtrain.extras.trained_models.arguments import Arguments, parse, read_former_run
from hvdtrain.extras.trained_models.saved_weights import load_model, run_folder
from hvdtrain.extras.trained_models.trained_model import check_tokenizer
from hvdtrain.features.log import DRAWN
from hvdtrain.training.checkpoint.files import Checkpoint
from hvdtrain.training.common_array import CommonArray
from hvdtrain.training.datasets import build_source
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.run_rank import ConnectedRank, on_connected_ranks
from hvdtrain.training.samples import png

USAGE = """\
hvdtrain sample RUN [--count 32] [--temperature 1.0] [--top-k N] [--png FILE.png] [key=value ...]
  RUN            the run folder of a job with task.name=language
  --count        images or texts to draw
  --temperature  1 draws tokens with the probabilities that the model gives; less prefers the probable ones; 0 takes the most probable
  --png          images: the picture to write, a grid (default grid.png)
  --prompt-half  images: the lower halves of validation images are drawn; each is shown beside the whole validation image
  --prompt       text: what each text begins with (default: a line break); of a run with data.messages, the message of a user
  --length       text: tokens to draw (default 256, or as many as a model of transformers has positions for)
  --top-k        each token is one of the N that the model finds most probable (default: all)
  --seed         of the random numbers (default 1): image i is the same in every batch and on any number of ranks
  --checkpoint   newest, best, or the name of one: step-00000120; default: newest, and of a run with stop.restore_best best
  --force        overwrite FILE.png if it exists
  key=value      batch.evaluate: sequences drawn at once by a rank; speed.*, comm.*, shard.stage, optim.ema=null (as in evaluate)
Under mpirun each rank draws its share, and has its parts of the weights where the run has shard.stage=3 (on comm.engine=mpi or
torchdist; shard.stage=0: the whole model)."""  # noqa: E501
_OPTIONS: dict[str, str | None] = {
    "--count": "32",
    "--temperature": "1",
    "--top-k": None,
    "--png": None,
    "--prompt": None,
    "--length": None,
    "--seed": "1",
    "--checkpoint": "",
}
_LENGTH = 256  # tokens of a text, by default
_MOST = 2**20  # limit for sequences, and for the tokens of a sequence
_OF_IMAGES = ("--png", "--prompt-half")
_OF_TEXT = ("--prompt", "--length")


@dataclass(frozen=True)
class SampleRequest:
    """The options of the command line."""

    count: int
    temperature: float
    top_k: int | None
    seed: int
    png: Path
    prompts_half: bool
    prompt: str
    length: int | None  # None: not set


def sample(arguments: Sequence[str]) -> int:
    """Runs `sample` on this rank; returns the exit code. Raises UserError only for a mistake in the
    command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    parsed = parse("sample", USAGE, arguments, _OPTIONS, ["--prompt-half", "--force"])
    request = _read(parsed)
    try:
        return on_connected_ranks(
            lambda rank: _sample(rank, parsed, request),
            None,
            parsed.of_job(),
            read_former_run=read_former_run,
            what="sampling",
        )
    except RankFailed as failed:
        return failed.code


def _sample(rank: ConnectedRank, parsed: Arguments, request: SampleRequest) -> int:
    config = unstaged(rank.config)
    if config.data.name not in DRAWN and not config.data.is_of_texts:
        what = (
            f"sample supports data.name={' and '.join(DRAWN)}, and texts of jsonl, csv and "
            "parquet; the run has "
            f"data.name={short(config.data.name)}"
        )
        raise UserError(what, "RUN", "another run folder")
    of_images = config.data.name in token_images()
    options, others = (_OF_TEXT, "text") if of_images else (_OF_IMAGES, "images")
    for option in options:
        if parsed.options[option.removeprefix("--").replace("-", "_")] not in (None, False):
            raise UserError(
                f"{option} is for {others}; the run has data.name={config.data.name}",
                option,
                "leave it out",
            )
    if of_images:
        _check_target(request.png, parsed.options["force"])
    model = load_model(rank, parsed)
    tokens = model.task.drawn
    if tokens is None:
        raise UserError(
            f"sample draws tokens, but the run has task.name={model.task.name}",
            "RUN",
            "a run with task.name=language",
        )
    sampler = sampler_of(model.learner, config)
    if sampler is None:
        raise UserError(
            f"framework={config.framework} does not draw tokens",
            "RUN",
            "a run with framework=torch",
        )
    if rank.communicator.rank == 0:
        print(
            "\n".join(
                [
                    *model.notes,
                    f"weights  {run_folder(rank)}, step "
                    f"{model.checkpoint.train_state.progress.step}",
                ]
            )
        )
    if of_images:
        _images(rank, config, sampler, tokens, request)
    else:
        _text(rank, config, sampler, tokens, request, model.checkpoint)
    return DONE


def _images(
    rank: ConnectedRank, config: Config, sampler: Sampler, tokens: Field, request: SampleRequest
) -> None:
    """Writes the grid."""
    start = tokens.values - 1
    pixels = tokens.shape[0] - 1
    whole = None
    prompts = np.full((request.count, 1), start, np.int64)
    if request.prompts_half:
        array = CommonArray(rank.communicator, run_folder(rank))
        source = build_source(config, "val", array)
        chosen = permutation(request.seed, 0, len(source))[: request.count]
        whole = source.read(chosen)["tokens"]  # (count, pixels + 1)
        prompts = whole[:, : 1 + pixels // 2]
    tokens_of_images = _of_all_ranks(rank, sampler, prompts, pixels + 1, start, request)
    if rank.communicator.rank:
        return
    pictures: Pictures = plugin_of(config).read_pictures(run_folder(rank), start)
    side = math.isqrt(pixels)
    images = pictures.decode(tokens_of_images[:, 1:]).reshape(len(tokens_of_images), side, side, -1)
    if whole is not None:
        images = np.concatenate([pictures.decode(whole[:, 1:]).reshape(images.shape), images], 2)
    _write(request.png, png(grid(images)))
    what = "images completed, each beside its whole" if whole is not None else "images drawn"
    print(f"{len(tokens_of_images)} {what}, {side}x{side} -> {request.png}")


def _text(
    rank: ConnectedRank,
    config: Config,
    sampler: Sampler,
    tokens: Field,
    request: SampleRequest,
    checkpoint: Checkpoint,
) -> None:
    """Prints the texts."""
    begin = read_prompt(config.data, request.prompt)
    prompt = begin.tokens
    tokenizer = begin.tokenizer
    longest: int | None = getattr(sampler, "longest", None)
    most = tokens.shape[0] - 1 if longest is None else longest - 1
    if not 1 <= len(prompt) <= most:
        raise UserError(f"the prompt has {len(prompt)} tokens", "--prompt", f"1 to {most}")
    if prompt.max() >= tokens.values:
        what = (
            f"the tokenizer returns token {prompt.max()} for the prompt, but the model only has 0 "
            f"to {tokens.values - 1}"
        )
        raise UserError(what, begin.where, "the tokenizer that the run was trained with")
    check_tokenizer(checkpoint, tokenizer.digest if tokenizer else None, begin.where)
    prompts = np.tile(prompt, (request.count, 1))
    length = len(prompt) + (request.length or _LENGTH)
    if longest is not None and request.length is None:
        length = min(length, longest)
    texts = _of_all_ranks(rank, sampler, prompts, length, tokens.values, request)
    if rank.communicator.rank == 0:
        ends = (*begin.ends, *getattr(sampler, "end_tokens", ()))
        for number, sequence in enumerate(texts, start=1):
            drawn = _until_end(sequence, len(prompt), ends)
            print(f"--- {number}\n{decode(drawn, tokenizer)}")


def _until_end(sequence: np.ndarray, begin: int, ends: Sequence[int]) -> np.ndarray:
    """Cuts a sequence before the first of the tokens `ends` from position `begin` on."""
    found = np.flatnonzero(np.isin(sequence[begin:], ends))
    return sequence[: begin + found[0]] if len(found) else sequence


def _of_all_ranks(
    rank: ConnectedRank,
    sampler: Sampler,
    prompts: np.ndarray,
    length: int,
    tokens: int,
    request: SampleRequest,
) -> np.ndarray:
    """Generates int64 (count, length): each rank continues its share of the prompts."""
    return draw_on_all_ranks(
        rank.communicator,
        sampler,
        prompts,
        length,
        tokens=tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        seed=request.seed,
        at_once=rank.config.batch.evaluate,
        before_each=lambda: rank.heartbeat.beat("sampling", 0, 0),
    )


def _read(parsed: Arguments) -> SampleRequest:
    """Parses the options. Raises UserError for values that make no sense."""
    options = parsed.options
    count = _number(
        options["count"], int, "--count", lambda n: 1 <= n <= _MOST, "1 or more, as in --count 32"
    )
    length, top_k = (
        None
        if options[option] is None
        else _number(
            options[option], int, name, lambda n: 1 <= n <= _MOST, f"1 or more, as in {name} 50"
        )
        for option, name in (("length", "--length"), ("top_k", "--top-k"))
    )
    seed = _number(options["seed"], int, "--seed", lambda n: 0 <= n < 2**63, "0 or more")
    temperature = _number(
        options["temperature"],
        float,
        "--temperature",
        lambda t: 0 <= t <= 1e6,
        "0 or more, as in --temperature 0.9",
    )
    path = Path(os.path.expanduser(options["png"] or "grid.png"))
    prompt = "\n" if options["prompt"] is None else options["prompt"]
    if path.suffix != ".png":
        raise UserError(f"{path} does not end in .png", "--png", "as in --png grid.png")
    return SampleRequest(
        count, temperature, top_k, seed, path, options["prompt_half"], prompt, length
    )


def _number(
    text: str, kind: Callable[[str], Any], option: str, fits: Callable[[Any], bool], fix: str
) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise UserError(f"{short(text)} is not a value of {option}", option, fix)
    return number


def _check_target(path: Path, force: bool) -> None:
    """Raises UserError if the picture cannot be written; called before anything is read."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", "--png", f"mkdir -p {path.parent}")
    if os.path.lexists(path) and not force:
        raise UserError(
            f"{path} exists already", "--png", "--force overwrites it; or give another name"
        )


def _write(path: Path, content: bytes) -> None:
    """Writes the whole file, or raises UserError and leaves it unchanged."""
    try:
        with Folder.open(path.parent) as folder:
            folder.replace(path.name, content)
    except OSError as error:
        fix = "give a folder that can be written and has room"
        raise UserError(f"cannot write {path}: {error.strerror or error}", "--png", fix) from None
