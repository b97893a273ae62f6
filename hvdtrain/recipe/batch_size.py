"""The global batch of a job: batch.size, or batch.per_rank x ranks."""

from __future__ import annotations

from typing import Literal

from hvdtrain.config.read import expand
from hvdtrain.config.schema import Config
from hvdtrain.config.section import COMMAND_LINE, DEFAULT
from hvdtrain.errors import UserError


def resolve_batch_size(config: Config, ranks: int) -> Config:
    """The configuration with batch.size set to batch.per_rank x ranks that read different samples, and batch.per_rank to None.

    Where both keys are set, the command line overrides files. A run folder stores batch.size, and with resume=RUN that value
    overrides a batch.per_rank of a file: the job keeps its batch on another number of ranks.
    Raises UserError where both keys are set and neither overrides the other.
    """
    per_rank = config.batch.per_rank
    if per_rank is None:
        return config
    if _key_that_counts(config) == "batch.size":
        return config.replace(batch=config.batch.replace(per_rank=None))
    resolved = config.replace(batch=config.batch.replace(size=per_rank * (config.readers(ranks)), per_rank=None))
    return resolved.with_provenance({"batch.size": f"{config.where('batch.per_rank')} x {ranks} ranks{_of_one_model(config)}"})


def _of_one_model(config: Config) -> str:
    """Ranks that have a model together read the same samples."""
    return f" / {config.parallel.ranks} of one model" if config.parallel.ranks > 1 else ""


def _key_that_counts(config: Config) -> Literal["batch.size", "batch.per_rank"]:
    """Which of the two keys sets the global batch, where batch.per_rank is set."""
    size_origin, per_rank_origin = config.origin("batch.size"), config.origin("batch.per_rank")
    if size_origin == DEFAULT:
        return "batch.per_rank"
    if size_origin == COMMAND_LINE and per_rank_origin != COMMAND_LINE:
        return "batch.size"
    if per_rank_origin == COMMAND_LINE and size_origin != COMMAND_LINE:
        return "batch.per_rank"
    if size_origin != COMMAND_LINE and _is_of_the_resumed_run(config, size_origin):
        return "batch.size"
    raise UserError("batch.size and batch.per_rank are both given", config.where("batch.per_rank"), "keep one of them")


def _is_of_the_resumed_run(config: Config, origin: str) -> bool:
    """Whether a value was set by the config.yaml of the run that resume=RUN names."""
    return config.resume not in ("auto", "no") and origin.rpartition(":")[0] == str(expand(config.resume, "resume") / "config.yaml")
