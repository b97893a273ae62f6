"""Rank 0 of a check whose other ranks do not exist: what it receives and does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from stand_in import RANKS_OF_HOST, WORDS, Counts, Phases, StandIn

from hvdtrain.comm.communicator import Buffer, Op
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.config.read import configure
from hvdtrain.extras.check.command import (
    RankInspection,
    TimeLimit,
    compare_ranks,
    connected_facts,
    inspect_job,
)
from hvdtrain.extras.check.dry_run import LARGE_BYTES
from hvdtrain.extras.check.report import CheckReport, to_text
from hvdtrain.recipe.batch import resolve_batch_size


class StandInOfCheck(StandIn):
    """A stand-in whose other ranks have their own numbers and hosts."""

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        # by which check measures the engine
        return super().allreduce(x, name, op) if x.nbytes < LARGE_BYTES else x

    def allgather_object(self, thing: Any) -> list[Any]:
        packed = pickle.dumps(thing)
        others = [_of_rank(rank, pickle.loads(packed)) for rank in range(1, self.size)]
        self._phases.receive(sum(len(pickle.dumps(other)) for other in others))
        return [thing, *others]


def _of_rank(rank: int, thing: Any) -> Any:
    """What rank 0 sends, as another rank would: in the first place of a pair what of its facts is
    not rank 0's."""
    if isinstance(thing, tuple) and isinstance(thing[0], dict):
        host = f"host{rank // RANKS_OF_HOST}"
        own = {
            "rank": rank,
            "local_rank": rank % RANKS_OF_HOST,
            "host": host,
            "machine": f"boot id of {host}",
            "pid": 100_000 + rank,
        }
        own |= {
            "networks": {"eth0": f"10.0.{rank // 256}.{rank % 256}"},
            "clock_s": 1e9 + rank / 1e6,
        }
        thing[0].update({name: [value] for name, value in own.items()})
    return thing


def check_of(size: int, run: Path) -> tuple[Counts, CheckReport]:
    """Returns the counts by phase of `hvdtrain check`, as rank 0 of `size`."""
    phases = Phases()
    communicator = StandInOfCheck(size, phases)
    place = Placement(0, size, 0, min(size, RANKS_OF_HOST), "a stand-in")
    limit = TimeLimit(0, 600)
    phases.beat("check", 0, 0)
    config = resolve_batch_size(configure(None, [*WORDS, f"run={run}"]), size)
    rank = RankInspection(connected_facts(place, communicator))
    run_folder = inspect_job(rank, config, communicator)
    report = compare_ranks(rank, config, run_folder, communicator, "a stand-in", place, limit)
    to_text(report)
    limit.cancel()
    phases.beat("", 0, 0)
    return phases.counts["check"], report
