"""parallel.context: ranks divide the positions of each sample, also in attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.config.exclusion import Exclusion, Values, above, among, options, other_than
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError
from hvdtrain.extras.context_parallel.keys import ContextKeys
from hvdtrain.features import comm, frameworks, lost, shards
from hvdtrain.features.job_feature import JobFeature, PlannedJob, needs_engine
from hvdtrain.features.of_extras import Added, AddedRows

_ARRANGEMENTS = "hvdtrain.extras.context_parallel.arrangement"


def _arrangement(config: Config) -> str:
    if config.parallel.has_stages:
        return ""  # PipelineStages, which divides samples by sample_division
    if config.shard.stage == 3:
        return f"{_ARRANGEMENTS}:sharded_rows_of_positions"
    kind = "DividedModel" if config.parallel.cuts else "WholeModel"
    return f"{_ARRANGEMENTS}:{kind}OfPositions"


def _divides_ranks(job: PlannedJob) -> Iterator[UserError]:
    context = ContextKeys.of(job.config).context
    if job.config.parallel.ranks == 1 and job.ranks % context:  # otherwise SHARED_MODEL
        yield UserError(
            f"parallel.context={context} does not divide the {job.ranks} ranks of the job",
            job.where("parallel.context"),
            f"a multiple of {context} ranks, or another parallel.context",
        )


def _lines(config: Config, hosts: Sequence[str]) -> Sequence[str]:
    keys = ContextKeys.of(config)
    positions = f"the positions of each sample ({keys.context_by})"
    if config.parallel.ranks > 1:  # SHARED_MODEL shows the mesh
        lines = [f"context {keys.context} ranks divide {positions}"]
    else:
        readers = len(hosts) // keys.context
        lines = [f"mesh    {readers} data x {keys.context} context, which divide {positions}"]
    apart = config.parallel.part_ranks  # between ranks with the same parts of layers
    groups = (
        hosts[first + part : first + apart * keys.context : apart]
        for first in range(0, len(hosts), apart * keys.context)
        for part in range(apart)
    )
    if any(len(set(group)) > 1 for group in groups):
        lines.append(
            "        ranks with positions of the same samples are on several hosts, whose link "
            "carries keys and values"
        )
    return lines


CONTEXT = JobFeature(
    key="parallel.context",
    on=lambda config: ContextKeys.of(config).context > 1,
    arrangement=_arrangement,
    sample_division=f"{_ARRANGEMENTS}:divide_positions",
    examples=(
        "parallel.context=2 task.name=language",
        "parallel.context=2 parallel.context_by=ulysses task.name=language",
    ),
    off="parallel.context=1",
    why="a rank only has the gradients of its positions",
    without=options("parallel.context", {"parallel.context_by": "ulysses"}, "parallel.context=2"),
    first=(_divides_ranks,),
    excludes=(
        Exclusion(
            "task.name",
            Values(lambda name: name != "language", "regression"),
            what="{chosen} divides sequences of task.name=language, but this is {set}",
            where="parallel.context",
            fix="task.name=language, or {off}",
            why="only the loss of a language model is divided by positions",
        ),
        *(
            Exclusion(
                key,
                values,
                what="{chosen} does not support {set} yet",
                fix="keep one of them",
                why="not built yet",
            )
            for key, values in {
                "parallel.dense": other_than("none", "a"),
            }.items()
        ),
        Exclusion("servers.count", above(0), why="a step is one rank's"),
        Exclusion("comm.op", among("adasum")),
        Exclusion("comm.local_steps", above(1)),
        Exclusion("comm.reduce", among("ddp", "distributed_optimizer"), why="not built yet"),
        Exclusion("norm.kind", among("sync"), why="not built yet"),
        Exclusion("log.noise_scale", among(True)),
        Exclusion("speed.compile", other_than("none", "default"), why="not built yet"),
        *comm.not_on_horovod(),
    ),
    rules=(
        needs_engine(
            "p2p",
            what="{chosen} needs sends between ranks, which the {engine} engine does not support",
            fix="comm.engine=mpi with the same mpirun, or comm.engine=torchdist",
            key="comm.engine",
        ),
    ),
    lines_of_ranks=_lines,
)

FEATURES = (Added((CONTEXT,), before=shards.SHARDS),)

_KEY = "parallel.context"
_ANY = above(1)
ROWS = (
    AddedRows(
        (frameworks.JAX, frameworks.NUMPY, frameworks.KERAS),
        frameworks.excluded(
            {
                _KEY: frameworks.Supported((1,), 2, "task.name=language"),
                "parallel.context_by": frameworks.Supported(("ring",), "ulysses"),
            }
        ),
        behind="comm.reduce",
    ),
    AddedRows((lost.SHRINK,), (lost.fewer_ranks(_KEY, _ANY, words="task.name=language"),)),
)
