"""The global batch of a job: batch.size, or batch.per_rank x ranks."""

from __future__ import annotations

from typing import Literal

from hvdtrain.config.read import COMMAND_LINE, Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError


def resolve_batch_size(config: Config, provenance: Provenance, ranks: int) -> tuple[Config, Provenance]:
    """The configuration with batch.size set to batch.per_rank x ranks, and batch.per_rank to None.

    Where both keys are set, the command line overrides files. A run folder stores batch.size, and when its job is resumed that value
    overrides a batch.per_rank of a file: the job keeps its batch on another number of ranks.
    Raises UserError where both keys are set and neither overrides the other.
    """
    if config.batch.per_rank is None:
        return config, provenance
    size = config.batch.size
    if _key_that_counts(config, provenance) == "batch.per_rank":
        size = config.batch.per_rank * ranks
        provenance = Provenance(provenance | {"batch.size": f"{provenance.where('batch.per_rank')} x {ranks} ranks"})
    return config.replace(batch=config.batch.replace(size=size, per_rank=None)).with_provenance(provenance), provenance


def _key_that_counts(config: Config, provenance: Provenance) -> Literal["batch.size", "batch.per_rank"]:
    """Which of the two keys sets the global batch, where batch.per_rank is set."""
    if "batch.size" not in provenance:
        return "batch.per_rank"
    size_on_command_line = provenance["batch.size"] == COMMAND_LINE
    per_rank_on_command_line = provenance.get("batch.per_rank") == COMMAND_LINE
    if size_on_command_line and not per_rank_on_command_line:
        return "batch.size"
    if per_rank_on_command_line and not size_on_command_line:
        return "batch.per_rank"
    if not size_on_command_line and config.resume != "no":
        return "batch.size"
    raise UserError("batch.size and batch.per_rank are both given", provenance.where("batch.per_rank"), "keep one of them")
