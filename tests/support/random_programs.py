"""Compares random programs of hvdtrain.horovod with NumPy, in one program on the ranks: seeded
calls, names, sizes, sets, orders of waiting.

python tests/support/random_programs.py FIRST_SEED PROGRAMS OUT.json        writes {seed: failure} of those that fail
"""  # noqa: E501

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from horovod_checks import given, judge, parts_of, reduced, wide

import hvdtrain.horovod as hvd

DTYPES = ("float32", "float64", "int32", "int64", "float16", "uint8", "bfloat16", "bool")


class Step(NamedTuple):
    """A collective, the same for every rank of its set."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int
    place: int  # of the process set
    name: str | None


def steps_of(dice: random.Random, sets: list[list[int]], named: bool, number: int) -> list[Step]:
    found = []
    for i in range(dice.randint(1, 12)):
        place = dice.randrange(len(sets))
        kind = dice.choice(
            (
                "allreduce",
                "allreduce",
                "allreduce",
                "broadcast",
                "allgather",
                "alltoall",
                "reducescatter",
            )
        )
        dtype = dice.choice(DTYPES)
        shape = tuple(
            dice.choice((0, 1, 2, 3, 7, 40, 300))
            for _ in range(dice.randint(0 if kind in ("allreduce", "broadcast") else 1, 2))
        )
        if dice.random() < 0.04:
            shape = (dice.randint(100_000, 1_500_000),)
        op = dice.choice(
            ("Sum", "Min", "Max", "Product")
            if dtype == "bool"
            else ("Average", "Sum", "Min", "Max", "Product")
        )
        name = f"step {number}.{i}" if named or dice.random() < 0.5 else None
        found.append(Step(kind, dtype, shape, op, dice.choice(sets[place]), place, name))
    return found


def begin(step: Step, process_set: Any, rank: int, in_place: bool) -> int:
    x = given(step.shape, rank, step.dtype)
    keywords = {"name": step.name, "process_set": process_set}
    match step.kind:
        case "allreduce":
            return (hvd.allreduce_async_ if in_place else hvd.allreduce_async)(
                x, op=getattr(hvd, step.op), **keywords
            )
        case "broadcast":
            return (hvd.broadcast_async_ if in_place else hvd.broadcast_async)(
                x, step.root, **keywords
            )
        case "allgather":
            return hvd.allgather_async(
                given((step.shape[0] + rank, *step.shape[1:]), rank, step.dtype), **keywords
            )
        case "reducescatter":
            return hvd.reducescatter_async(x, op=getattr(hvd, step.op), **keywords)
    ranks = process_set.ranks
    return hvd.alltoall_async(
        given((sum(splits(step, rank, ranks)), *step.shape[1:]), rank, step.dtype),
        splits(step, rank, ranks),
        **keywords,
    )


def splits(step: Step, rank: int, ranks: list[int]) -> list[int]:
    return [(step.shape[0] + rank * to) % 5 for to in ranks]


def expected(step: Step, ranks: list[int], rank: int) -> np.ndarray:
    match step.kind:
        case "allreduce":
            return reduced(step.shape, ranks, step.dtype, step.op)
        case "broadcast":
            return wide(given(step.shape, step.root, step.dtype))
        case "allgather":
            return np.concatenate(
                parts_of(ranks, lambda r: step.shape[0] + r, step.shape[1:], step.dtype)
            )
        case "reducescatter":
            return np.array_split(reduced(step.shape, ranks, step.dtype, step.op), len(ranks))[
                ranks.index(rank)
            ]
    sources = parts_of(ranks, lambda r: sum(splits(step, r, ranks)), step.shape[1:], step.dtype)
    mine = ranks.index(rank)
    starts = [sum(splits(step, r, ranks)[:mine]) for r in ranks]
    return np.concatenate(
        [
            s[start : start + splits(step, r, ranks)[mine]]
            for s, start, r in zip(sources, starts, ranks, strict=True)
        ]
    )


def run(seed: int, sets: list[Any]) -> None:
    """Each rank starts and waits for named requests in its own order; unnamed requests follow the
    program's order."""
    common = random.Random(seed)
    own = random.Random(seed * 1000 + hvd.rank())
    rank = hvd.rank()
    all_ranks = [process_set.ranks for process_set in sets]
    for number in range(common.randint(1, 4)):
        named = common.random() < 0.7
        steps = [
            step
            for step in steps_of(common, all_ranks, named, number)
            if rank in all_ranks[step.place]
        ]
        order = own.sample(steps, len(steps)) if named else steps
        handles = []
        for step in order:
            handles.append((begin(step, sets[step.place], rank, own.random() < 0.3), step))
            if own.random() < 0.15:
                hvd.poll(handles[-1][0])
        if named or own.random() < 0.5:
            own.shuffle(handles)
        for handle, step in handles:
            found = hvd.synchronize(handle)
            judge(
                found[0] if step.kind == "alltoall" else found,
                expected(step, all_ranks[step.place], rank),
                step.dtype,
            )


def main() -> None:
    first = int(sys.argv[1])
    programs = int(sys.argv[2])
    out = Path(sys.argv[3])
    torch.set_num_threads(1)
    hvd.init()
    size = hvd.size()
    pairs = [list(pair) for pair in itertools.combinations(range(size), 2)] if size > 2 else []
    sets = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in pairs[:4])]
    failures = {}
    for seed in range(first, first + programs):
        try:
            run(seed, sets if seed % 3 else sets[:1])
        except AssertionError as error:
            failures[seed] = f"rank {hvd.rank()}: {error}"
        except Exception as error:
            error.add_note(f"program {seed}")
            raise
    for other in hvd.allgather_object(failures):
        failures |= other
    if hvd.rank() == 0:
        out.write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
