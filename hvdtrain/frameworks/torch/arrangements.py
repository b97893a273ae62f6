"""The ways to have a model on ranks: one list of the classes in parallel/, of which a job imports
the one that it asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hvdtrain.config.schema import Config
from hvdtrain.frameworks.torch.arrangement import Arrangement


class Entry(NamedTuple):
    """A class of parallel/."""

    is_asked: Callable[[Config], bool]
    module: str
    name: str


ENTRIES = (  # the first one that is asked for
    Entry(lambda config: config.shard.stage == 3, "fsdp.arrangement", "ShardedRows"),
    Entry(lambda config: config.parallel.pipeline > 1, "pipeline.arrangement", "PipelineStages"),
    Entry(lambda config: config.parallel.tensor > 1, "tensor.arrangement", "TensorParts"),
    Entry(lambda config: config.parallel.dense != "none", "dense.arrangement", "Dense"),
    Entry(lambda config: config.servers.count > 0, "parameter_server.arrangement", "Servers"),
    Entry(lambda config: True, "whole_model", "WholeModel"),
)


def arrangement_of(config: Config) -> type[Arrangement]:
    """The class of the arrangement that the configuration asks for. It alone is imported: some take
    half a second."""
    entry = next(entry for entry in ENTRIES if entry.is_asked(config))
    found: type[Arrangement] = getattr(module_of(entry.module), entry.name)
    return found


def module_of(name: str) -> Any:
    """A module of parallel/, by its name: nothing here imports one of them otherwise."""
    return importlib.import_module(f"{__package__}.parallel.{name}")
