"""Lab 6: ranks started by hand on each node, by torchrun and by mpirun; what training costs in
seconds, and in joules or processor-seconds; how far ranks scale that share a storage.

python -m hvdtrain lab 6 [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
from runs import event, start, write_table

import hvdtrain
from hvdtrain.comm.rendezvous import address_towards
from hvdtrain.extras.figures.figure import COLOURS, GREY, integer_ticks, new_figure
from hvdtrain.extras.lab.command import Parser, run_lab

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
# This machine's address, as other machines call it: two "nodes" on one machine use it, too. Without
# a network there is one node.
HOST = address_towards("192.0.2.1") or "127.0.0.1"
NODES, EACH = (1, 4) if HOST.startswith("127.") else (2, 2)
# Gloo; on GPUs NCCL
ENGINE = (
    "comm.engine=torchdist",
    "comm.reduce=ddp",
    "comm.timeout_s=60",
    "speed.device=cpu",
)
TRAINED = ("model.name=net:Net", "batch.size=64", "optim.base_lr=0.05", "log.every_steps=5")
TARGET = 0.95  # of the validation images
COSTLY = (
    "model.name=convnet",
    "model.norm=false",
    f"stop.target={TARGET}",
    "epochs=40",
    "batch.size=128",
    "optim.base_lr=0.1",
    "speed.device=cpu",
)
STORAGE_RATE = 118e6  # bytes/s: a file server behind gigabit Ethernet
BATCH_BYTES = 32 * 110_000  # of a rank and step, as in scaling.py
KINDS = {"cpu": "processors", "gpu": "GPUs"}
Commands = list[list[str]]  # one for each node


class Cost(NamedTuple):
    """Of one job: training, and the start (Python, torch, finding the others), which is that of a
    job of one step."""

    ranks: int
    samples: int
    seconds: float
    start_cpu_s: float
    cpu_s: float
    joules: float | None  # None: not measured here
    accuracy: float


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"{HOST}:{probe.getsockname()[1]}"


def by_hand(words: Sequence[str]) -> Commands:
    """Each of these on its node; the address is one of node 0."""
    address = f"comm.address={free_address()}"
    nodes = [
        ["--num-nodes", str(NODES), "--node-id", str(node), "--num-gpus", str(EACH), address]
        for node in range(NODES)
    ]
    return [[sys.executable, "-m", "hvdtrain", *options, *words] for options in nodes]


def by_torchrun(words: Sequence[str]) -> Commands:
    host, port = free_address().split(":")
    options = [
        f"--nnodes={NODES}",
        f"--nproc-per-node={EACH}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    return [[*torchrun, f"--node-rank={node}", "-m", "hvdtrain", *words] for node in range(NODES)]


def by_mpirun(words: Sequence[str]) -> Commands:
    """One command for all nodes: -H n1:2,n2:2 would name them."""
    return [
        [
            sys.executable,
            "-m",
            "hvdtrain",
            "launch",
            "-np",
            str(NODES * EACH),
            "--oversubscribe",
            "--",
            *words,
        ]
    ]


def ranks_of(launcher: str, out: Path, epochs: int) -> tuple[list[dict[str, Any]], list[float]]:
    """What each rank was told, and the losses of the epochs."""
    run = out / launcher.replace(" ", "-")
    told = out / f"{launcher.replace(' ', '-')}-ranks"
    for folder in (run, told):  # of an earlier start of the lab
        shutil.rmtree(folder, ignore_errors=True)
    told.mkdir()
    words = [*ENGINE, *TRAINED, f"epochs={epochs}", f"run={run}"]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    start(
        LAUNCHERS[launcher](words),
        out / f"{run.name}.log",
        f"the job started {launcher}",
        LAB_RANKS=str(told.resolve()),
        PYTHONPATH=path,
    )
    ranks = [json.loads((told / f"rank-{rank}.json").read_text()) for rank in range(NODES * EACH)]
    events = hvdtrain.read(run)
    losses = list(events[events.kind == "epoch"].val_loss)
    print(
        f"{launcher:8} "
        + ", ".join(
            f"rank {one['rank']}: local rank {one['local_rank']} of {one['local_size']}"
            for one in ranks
        ),
        flush=True,
    )
    return ranks, losses


LAUNCHERS = {"by hand": by_hand, "torchrun": by_torchrun, "mpirun": by_mpirun}


def start_ranks(out: Path, epochs: int) -> None:
    names = [name for name in LAUNCHERS if name != "mpirun" or has_mpirun()]
    if len(names) < len(LAUNCHERS):
        print("mpirun is not here: left out")
    found = {name: ranks_of(name, out, epochs) for name in names}
    first = found["by hand"][1]
    different = max(
        abs(a - b) for _, losses in found.values() for a, b in zip(losses, first, strict=True)
    )
    print(f"the losses of the {len(names)} ways differ by {different:.1e} at most", flush=True)
    write_table(
        out / "ranks.csv",
        ["start", "rank", "local rank", "node"],
        [(name, *row) for name in names for row in places(found[name][0])],
    )
    draw_ranks(found, out / "ranks.png")


def has_mpirun() -> bool:
    return any(
        shutil.which("mpirun", path=path) for path in (str(Path(sys.executable).parent), None)
    )


def places(ranks: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Rank, local rank and node of each: nodes have equally many ranks."""
    return [(one["rank"], one["local_rank"], one["rank"] // one["local_size"]) for one in ranks]


def draw_ranks(found: dict[str, tuple[list[dict[str, Any]], list[float]]], path: Path) -> None:
    """The nodes as each launcher has them, and the losses."""
    from matplotlib.patches import Rectangle

    figure, panels = new_figure(1, len(found) + 1, width=11, height=2.7)
    for axes, (launcher, (ranks, _)) in zip(panels, found.items(), strict=False):
        axes.set_title(launcher, fontsize=9)
        axes.axis("off")
        axes.axis((0, 4, 0, 3.6))
        for node in sorted({node for _, _, node in places(ranks)}):
            axes.add_patch(
                Rectangle((0, 2 - 1.8 * node), ranks[0]["local_size"], 1.2, facecolor="#EEEEEE")
            )
            axes.text(0, 3.25 - 1.8 * node, f"node {node}", fontsize=8)
        for rank, local_rank, node in places(ranks):
            axes.text(
                local_rank + 0.5,
                2.6 - 1.8 * node,
                f"rank {rank}\nlocal {local_rank}",
                fontsize=7.5,
                color="white",
                **BOX,
            )
    for index, (launcher, (_, losses)) in enumerate(found.items()):
        style = {
            "color": COLOURS[index],
            "ms": 12 - 3 * index,
            "mfc": "none",
            "mew": 1.5,
            "lw": 0.8,
        }
        panels[-1].plot(range(1, len(losses) + 1), losses, "o-", label=launcher, **style)
    panels[-1].set_title("validation loss of each epoch", fontsize=8)
    panels[-1].set_xlabel("epoch")
    panels[-1].legend(frameon=False, fontsize=8)
    integer_ticks(panels[-1].xaxis)
    figure.savefig(path, dpi=110)


BOX = {
    "ha": "center",
    "va": "center",
    "bbox": {"boxstyle": "round,pad=0.5", "facecolor": COLOURS[0], "edgecolor": "none"},
}


def job(ranks: int, words: Sequence[str], run: Path) -> float:
    """Trains; returns the processor-seconds of all processes of the job, from their start to their
    end."""
    shutil.rmtree(run, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "hvdtrain",
        *(["--num-gpus", str(ranks)] if ranks > 1 else []),
        *words,
        f"run={run}",
    ]
    start([command], run.with_name(f"{run.name}.log"), f"the job {run.name}", OMP_NUM_THREADS="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cost(ranks: int, widths: str, out: Path) -> Cost:
    start_cpu_s = job(ranks, [*COSTLY, widths, "stop.steps=1"], out / f"start-{ranks}")
    cpu_s = job(ranks, [*COSTLY, widths], out / f"ranks-{ranks}")
    end = event(out / f"ranks-{ranks}", "end")
    found = Cost(
        ranks,
        end["samples"],
        end["seconds"],
        start_cpu_s,
        cpu_s - start_cpu_s,
        joules(end),
        end["val_accuracy"],
    )
    print(
        f"{ranks} rank{'s' * (ranks > 1)}: accuracy {found.accuracy:.4f} after {found.samples:,} "
        f"samples in {found.seconds:.1f} s, "
        f"{found.cpu_s:.1f} processor-seconds"
        + (f", {found.joules:.0f} J" if found.joules is not None else ""),
        flush=True,
    )
    return found


def joules(end: dict[str, Any]) -> float | None:
    """Of processors and GPUs, by the counters that the job could read, from its event `end`; None
    where there was none."""
    measured = [value for value in end["joules"].values() if value is not None]
    return sum(measured) if measured else None


def why_not(start: dict[str, Any]) -> list[str]:
    """A line for each kind that is not measured, from the event `start`."""
    return [
        f"energy of {KINDS[kind]} is not measured: {reason}"
        for kind, reason in start.get("energy", {}).items()
        if reason
    ]


def measure_cost(out: Path, ranks: Sequence[int], widths: str) -> None:
    costs = [cost(count, widths, out) for count in ranks]
    print("\n".join(why_not(event(out / f"ranks-{ranks[0]}", "start"))), flush=True)
    write_table(
        out / "cost.csv",
        [*Cost._fields, "per 1,000 samples"],
        [(*one, 1e3 * spent(one)[1] / one.samples) for one in costs],
    )
    draw_cost(costs, out / "cost.png")


def spent(one: Cost) -> tuple[str, float]:
    """Joules where there is a counter; else processor-seconds, which are no energy."""
    return ("processor-seconds", one.cpu_s) if one.joules is None else ("joules", one.joules)


def draw_cost(costs: Sequence[Cost], path: Path) -> None:
    figure, (left, middle, right) = new_figure(1, 3, width=11, height=3.1)
    unit = spent(costs[0])[0]
    names = [str(one.ranks) for one in costs]
    left.bar(names, [one.seconds for one in costs], 0.55, color=COLOURS[0])
    left.set_title(f"seconds to accuracy {TARGET}", fontsize=9)
    middle.bar(
        names,
        [1e3 * spent(one)[1] / one.samples for one in costs],
        0.55,
        color=COLOURS[1],
        label="training",
    )
    if unit != "joules":
        bottom = [1e3 * one.cpu_s / one.samples for one in costs]
        middle.bar(
            names,
            [1e3 * one.start_cpu_s / one.samples for one in costs],
            0.55,
            bottom,
            color="#BBBBBB",
            label="start",
        )
        middle.legend(frameon=False, fontsize=8)
    middle.set_title(f"{unit} per 1,000 samples", fontsize=9)
    for axes in (left, middle):
        axes.set_xlabel("ranks")
    for one in costs:
        right.plot(one.seconds, spent(one)[1], "o", color=COLOURS[2], ms=8)
        # above the dashed line
        place = {
            "xytext": (4, 5),
            "textcoords": "offset points",
            "fontsize": 8,
        }
        right.annotate(
            f"{one.ranks} ranks" if one.ranks > 1 else "1 rank",
            (one.seconds, spent(one)[1]),
            **place,
        )
    right.axhline(spent(costs[0])[1], color="#777777", ls="--", lw=1, label="as much as one rank")
    right.set_xlim(0, 1.3 * max(one.seconds for one in costs))
    right.set_ylim(0, 1.2 * max(spent(one)[1] for one in costs))
    right.set_xlabel(f"seconds to accuracy {TARGET}")
    right.set_title(f"{unit} to accuracy {TARGET}", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


class Scaled(NamedTuple):
    """Seconds of a step on so many ranks, each with a batch of its own (scaling.py)."""

    ranks: int
    unlimited: float
    limited: float


def storage_limit(out: Path, ranks: Sequence[int], steps: int) -> None:
    found = [scaled(out, count, steps) for count in ranks]
    for one in found:
        free, shared = (efficiency(found, one.ranks, s) for s in (one.unlimited, one.limited))
        print(
            f"{one.ranks} rank{'s' * (one.ranks > 1)}: efficiency {free:.2f}, with storage of "
            f"{STORAGE_RATE / 1e6:.0f} MB/s {shared:.2f}",
            flush=True,
        )
    write_table(out / "storage.csv", Scaled._fields, found)
    draw_storage(found, out / "storage.png")


def scaled(out: Path, ranks: int, steps: int) -> Scaled:
    found = out / f"storage-{ranks}.json"
    words = [str(HERE / "scaling.py"), str(found.resolve()), str(steps), str(STORAGE_RATE)]
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "--oversubscribe"]
    log = out / f"storage-{ranks}.log"
    start([[*command, "--", *words]], log, f"scaling.py on {ranks} ranks", OMP_NUM_THREADS="1")
    return Scaled(ranks, **json.loads(found.read_text()))


def efficiency(found: Sequence[Scaled], ranks: int, step_s: float) -> float:
    """Samples per second on these ranks over those of as many ranks that never wait: each has a
    batch a step, so the time of a step alone counts."""
    return next(one.unlimited for one in found if one.ranks == 1) / step_s


def storage_model(ranks: float, step_s: float) -> float:
    """Efficiency by the model: a step takes as long as computing on a rank, or as reading for all,
    whichever is longer. step_s: of one rank that does not wait for data."""
    return step_s / max(step_s, ranks * BATCH_BYTES / STORAGE_RATE)


def draw_storage(found: Sequence[Scaled], path: Path) -> Figure:
    figure, (axes,) = new_figure(width=6.4, height=3.6)
    alone_s = next(one.unlimited for one in found if one.ranks == 1)
    most = found[-1].ranks
    grid = [1 + (most - 1) * step / 100 for step in range(101)]
    axes.plot(
        grid,
        [storage_model(ranks, alone_s) for ranks in grid],
        color=GREY,
        lw=1.2,
        label="model: min(1, storage's rate / rate that the ranks need)",
    )
    for index, (name, label) in enumerate(
        (("unlimited", "no limit"), ("limited", f"storage of {STORAGE_RATE / 1e6:.0f} MB/s"))
    ):
        points = [efficiency(found, one.ranks, getattr(one, name)) for one in found]
        axes.plot(
            [one.ranks for one in found], points, "os"[index], color=COLOURS[index], label=label
        )
    axes.set_xticks([one.ranks for one in found])
    axes.set_xlabel("ranks, each with a batch of its own")
    axes.set_ylabel("scaling efficiency")
    axes.set_ylim(0, 1.1)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=1)
    figure.savefig(path, dpi=110)
    return figure


def main(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    start_ranks(options.out, 2 if options.quick else 8)
    widths = "model.widths=[96,192]" if options.quick else "model.widths=[256,512]"
    measure_cost(options.out, (1, 2) if options.quick else (1, 2, 4), widths)
    if has_mpirun():
        counts = (1, 2, 4, 8) if options.quick else (1, 2, 3, 4, 6, 8)
        storage_limit(options.out, counts, 8 if options.quick else 20)
    else:
        print("mpirun is not here: no figure of the storage")
    figures = ", ".join(f"{options.out / name}.png" for name in ("ranks", "cost", "storage"))
    print(f"figures: {figures}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_lab(main, Parser(__file__, __doc__, quick="less to train, 1 and 2 ranks"))
