"""One rank is killed, or a host is cut off, again and again under launch --elastic: seconds from the fault to the next sync point.

python benchmarks/restarts.py rank [--ranks 2] [--times 5] [--lost stop | restart | shrink]
python benchmarks/restarts.py host [--times 5] [--lost ...]      # three hosts in network namespaces: as root
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "extras"))

from cluster_hosts import Hosts
from faults import events, reached, supervisor, told, wait_for
from ranks import Job
from test_launch_elastic_faults import WORDS


def goes_on_s(run: Path, before: int, lost: str) -> float:
    """When the first sync point after the fault was; 0 while there is none. before: events then."""
    kinds = ("lost", "start") if lost == "shrink" else ("start",)
    after = events(run)[before:]
    begun = next(
        (number for number, event in enumerate(after) if event["kind"] in kinds), len(after)
    )
    return next((event["time"] for event in after[begun:] if event["kind"] == "step"), 0.0)


def trains_on(run: Path, ranks: int) -> bool:
    lines = told(run)
    return (
        bool(lines)
        and lines[-1]["kind"] == "trains"
        and lines[-1]["ranks"] == ranks
        and reached(run) >= 100
    )


def command(run: Path, hosts: list[str], lost: str) -> list[str]:
    options = ["--elastic", "--every", "1", *hosts]
    return [
        "-m",
        "hvdtrain",
        "launch",
        *options,
        "--",
        f"run={run}",
        *WORDS,
        "batch.size=24",
        f"guard.lost={lost}",
    ]


def kill_ranks(run: Path, ranks: int, times: int, lost: str) -> list[float]:
    found = []
    (run.parent / "hosts").write_text(f"localhost slots={ranks}\n")
    with Job(
        0, command(run, ["--hostfile", str(run.parent / "hosts")], lost), timeout_s=600
    ) as job:
        for turn in range(times):
            wait_for(job, lambda: trains_on(run, ranks) and len(job.pids()) == ranks, 120)
            before = len(events(run))
            began_s = time.time()
            os.kill(job.pids()[turn % ranks], signal.SIGKILL)
            wait_for(job, lambda n=before: goes_on_s(run, n, lost), 120)
            found.append(goes_on_s(run, before, lost) - began_s)
            print(f"{found[-1]:.2f} s", flush=True)
            time.sleep(0.5)
        os.kill(supervisor(job), signal.SIGTERM)
        job.wait()
    return found


def cut_hosts(folder: Path, times: int, lost: str) -> list[float]:
    found = []
    with Hosts(3) as hosts:
        for turn in range(times):
            run = folder / str(turn)
            argv = [sys.executable, *command(run, ["-H", "n1:1,n2:1,n3:1"], lost)]
            with hosts.start("n1", argv, timeout_s=120) as job:
                wait_for(job, lambda run=run: trains_on(run, 3))
                hosts.cut("n2")
                before = len(events(run))
                began_s = time.time()
                wait_for(job, lambda run=run, n=before: goes_on_s(run, n, lost))
                found.append(goes_on_s(run, before, lost) - began_s)
                print(f"{found[-1]:.2f} s", flush=True)
                os.kill(supervisor(job), signal.SIGTERM)
                job.wait()
            hosts.heal("n2")
            hosts.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=["rank", "host"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--lost", choices=["stop", "restart", "shrink"], default="stop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.fault == "rank":
            found = kill_ranks(Path(folder) / "run", options.ranks, options.times, options.lost)
        else:
            found = cut_hosts(Path(folder), options.times, options.lost)
    load = os.getloadavg()[0]
    print(
        f"median {statistics.median(found):.2f} s, {min(found):.2f} to {max(found):.2f} s, "
        f"n={len(found)}, load {load:.0f}"
    )


if __name__ == "__main__":
    main()
