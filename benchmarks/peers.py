"""Milliseconds of a training step on two ranks: plain Horovod, DDP over Gloo, Lightning, Accelerate, and hvdtrain, in turn.

python benchmarks/peers.py --root DIR [--rounds 5] [--precision fp32,bf16] [--dropout 0.0] [--json FILE] [--only PEER ...]

All train the same network from the same weights with the same global batch and SGD on Fashion-MNIST, one thread a rank. The scripts in
peers/*.py follow the documentation of each peer and use its fast options. In each round every peer is started again, and each round
begins with another peer. The time of a step in a round is the median of the run's blocks. The ratio is to the fastest of the other
trainers in the same round: below 1 is faster than all of them. CPU ms: CPU time of a step on one
rank, over all its threads; it separates work from waiting if the machine is busy.

hvdtrain does not install Lightning and Accelerate:
    .venv/bin/pip install -c constraints.txt lightning accelerate
or, leaving the environment as it is, into a folder that PYTHONPATH then names, with what `pip install --dry-run` lists as missing:
    .venv/bin/pip install --no-deps --target FOLDER lightning accelerate ...
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from blocks import spread

FOLDER = Path(__file__).resolve().parent / "peers"
RANKS = 2
LOSS_TOLERANCE = 0.1  # of the first block's loss, relative to the median of all peers
NOT_INSTALLED = "not installed"
FAILED = "failed"
OURS = "hvdtrain"


class Peer(NamedTuple):
    """A script of peers/, the package that it needs, and its own arguments."""

    script: str
    package: str
    arguments: tuple[str, ...] = ()


PEERS = {
    "horovod": Peer("hvd_script.py", "horovod"),
    "ddp gloo": Peer("ddp_gloo.py", "torch"),
    "lightning": Peer("lightning_script.py", "lightning"),
    "accelerate": Peer("accelerate_script.py", "accelerate"),
    f"{OURS} horovod": Peer("hvdtrain_script.py", "horovod", ("--engine", "horovod")),
    f"{OURS} horovod comm.reduce=bucket": Peer(
        "hvdtrain_script.py", "horovod", ("--engine", "horovod", "comm.reduce=bucket")
    ),
    f"{OURS} mpi": Peer("hvdtrain_script.py", "mpi4py", ("--engine", "mpi")),
    f"{OURS} torchdist": Peer("hvdtrain_script.py", "torch", ("--engine", "torchdist")),
    f"{OURS} torchdist comm.reduce=ddp": Peer(
        "hvdtrain_script.py", "torch", ("--engine", "torchdist", "comm.reduce=ddp")
    ),
}
DEFAULTS = {  # as the Makefile sets them for ranks on one machine; the environment overrides them
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def environment() -> dict[str, str]:
    """Returns the environment of one run: one thread per rank, and a free port for
    torch.distributed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])  # free a moment ago
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return (
        DEFAULTS
        | dict(os.environ)
        | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PATH": path}
    )


def run(peer: Peer, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Returns the script's line of JSON, with an empty "state"; if there is none, {"state":
    NOT_INSTALLED or FAILED, "why": ...}."""
    if importlib.util.find_spec(peer.package) is None:
        return {"state": NOT_INSTALLED, "why": f"no module {peer.package}"}
    command = [
        "timeout",
        "-k",
        "5",
        str(limit_s),
        "mpirun",
        "-np",
        str(RANKS),
        sys.executable,
        str(FOLDER / peer.script),
    ]
    done = subprocess.run(
        [*command, *arguments, *peer.arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode == 0 and len(lines) == 1:
        result: dict[str, Any] = json.loads(lines[0])
        return result | {
            "state": "",
            "first_loss": result["losses"][0],
            "step_ms": round(statistics.median(result["ms_per_step"]), 3),
            "cpu_ms": round(statistics.median(result["cpu_ms_per_step"]), 3),
        }
    why = (
        f"exceeded {limit_s:.0f} s"
        if done.returncode == 124
        else f"exit code {done.returncode}, {len(lines)} lines"
    )
    print(done.stderr[-2000:], file=sys.stderr)
    last_line = next(
        (line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no message"
    )
    return {"state": FAILED, "why": f"{why}: {re.sub(r'/[^ ]*/', '', last_line)[:200]}"}


def measure(options: argparse.Namespace, precision: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of each peer, one of each round."""
    arguments = [
        f"--{key}={getattr(options, key)}"
        for key in ("root", "dropout", "warmup", "blocks", "steps", "bound")
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for number in range(options.rounds):
        start = number % len(options.only)
        for name in options.only[start:] + options.only[:start]:
            line = run(PEERS[name], [*arguments, f"--precision={precision}"], options.limit_s) | {
                "name": name,
                "round": number,
            }
            line |= {
                "load": round(os.getloadavg()[0], 1),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            found[name].append(line)
            print(
                f"{precision} round {number}: {name} {line.get('step_ms') or line['why']}",
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                with options.json.open("a") as file:
                    file.write(
                        json.dumps(
                            line
                            | {
                                "machine": f"{RANKS} ranks on {os.cpu_count()} cores, "
                                f"{platform.machine()}"
                            }
                        )
                        + "\n"
                    )
    return found


def check_losses(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line for each peer whose loss after the first block differs from the others': it does not
    train the same."""
    first_losses = {
        name: [line["first_loss"] for line in lines if not line["state"]]
        for name, lines in found.items()
    }
    losses = {name: statistics.median(values) for name, values in first_losses.items() if values}
    median = statistics.median(losses.values()) if losses else 0.0
    return [
        f"{name}: loss {loss:.3f} in the first block, the median is {median:.3f}"
        for name, loss in losses.items()
        if abs(loss / median - 1) > LOSS_TOLERANCE
    ]


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Returns each peer's step time divided by the fastest other trainer's, in every round that has
    both."""
    others = [lines for name, lines in found.items() if not name.startswith(OURS)]
    found_ratios: dict[str, list[float]] = {name: [] for name in found}
    for number in range(max(map(len, found.values()))):
        best = min(
            (lines[number]["step_ms"] for lines in others if not lines[number]["state"]),
            default=None,
        )
        for name, lines in found.items():
            if best and not lines[number]["state"]:
                found_ratios[name].append(lines[number]["step_ms"] / best)
    return found_ratios


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    heads = (
        "trainer",
        "ms a step, median (quartiles; runs)",
        "to the fastest other, median (quartiles)",
        "CPU ms of a rank",
        "loss",
        "versions",
    )
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, to_best in ratios(found).items():
        good = [line for line in found[name] if not line["state"]]
        bad = ", ".join(sorted({line["state"] for line in found[name] if line["state"]}))
        if not good:
            rows.append(f"| {name} | {bad} | | | | |")
            continue
        versions = ", ".join(
            f"{key} {value}" for key, value in good[-1]["versions"].items() if key != "python"
        )
        cpu = statistics.median(line["cpu_ms"] for line in good)
        loss = statistics.median(line["losses"][-1] for line in good)
        times = median_and_quartiles(
            [line["step_ms"] for line in good], 1, f"; {len(good)}{f', {bad}' if bad else ''}"
        )
        rows.append(
            f"| {name} | {times} | {median_and_quartiles(to_best, 3, '')} | {cpu:.1f} | "
            f"{loss:.3f} | {versions} |"
        )
    return "\n".join(rows)


def median_and_quartiles(values: list[float], digits: int, more: str) -> str:
    """12.3 (11.9 to 12.8; 5)"""
    if len(values) < 2:
        return f"{values[0]:.{digits}f} (-{more})" if values else "-"
    median, (low, high) = spread(values, digits)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}{more})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="folder that holds FashionMNIST/raw"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="torch's own nn.Dropout for all but hvdtrain"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=10,
        help="steps before the first block; a multiple of 10, as --steps",
    )
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps of a block")
    parser.add_argument(
        "--bound",
        type=float,
        default=1.5,
        help="the run fails unless the last block's loss is below",
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of one run")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append a line for each run to this file"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        metavar="PEER",
        help=", ".join(PEERS),
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    problems: list[str] = []
    for precision in options.precision.split(","):
        found = measure(options, precision)
        facts = (
            f"global batch 128, {options.blocks} blocks of {options.steps} steps, load at the end "
            f"{os.getloadavg()[0]:.1f}"
        )
        print(
            f"\n{precision}, dropout {options.dropout}, {RANKS} ranks of one thread on "
            f"{os.cpu_count()} cores, {facts}\n\n{table(found)}",
            flush=True,
        )
        problems += [f"{precision}: {message}" for message in check_losses(found)]
        problems += [
            f"{precision}: {name}: {line['why']}"
            for name, lines in found.items()
            for line in lines
            if line["state"] == FAILED
        ]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
