"""hvdtrain through submitit: a Python program submits the job, waits for it, and gets its result.

python jobs/submitit_job.py --nodes 2 --ranks 4 --minutes 240 run=/shared/run epochs=30 [--config /shared/job.yaml]     # SLURM
python jobs/submitit_job.py --cluster local --ranks 2 run=run epochs=3                                               # this machine

srun starts the ranks with the MPI that --mpi names for it (pmix for Open MPI, pmi2 for MPICH and Intel MPI); with --mpi none, and on this
machine, the engine is torchdist. Before its time limit the job writes a checkpoint, is requeued, and resumes from the checkpoint.
"""  # noqa: E501

from __future__ import annotations

import argparse
import subprocess
import sys

import submitit

import hvdtrain
from hvdtrain.config.plugins import check_names
from hvdtrain.config.read import configure
from hvdtrain.errors import REQUEUE, UserError


def train(config: str | None, arguments: list[str]) -> dict[str, float]:
    """One rank of the job. What the job comes to, on every rank; a script of your own has its model
    and data here."""
    run = hvdtrain.train(config, *arguments)
    if run.code == REQUEUE:  # without a result: submitit goes on waiting for the job
        task = submitit.JobEnvironment()
        if task.cluster == "slurm" and run.rank == 0 and run.why != "SIGTERM":  # that is scancel
            subprocess.run(["scontrol", "requeue", task.job_id], check=True)
        sys.exit(run.code)
    return {"best": run.best, "last": run.last, "steps": run.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cluster", choices=["slurm", "local"], help="default: slurm where there is an srun"
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="on each node; with GPUs one each")
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("--minutes", type=int, default=60, help="the time limit")
    parser.add_argument("--mpi", default="pmix", help="of srun")
    parser.add_argument("--logs", default="submitit-%j", help="a folder that every node sees")
    parser.add_argument("--config")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="run=DIR among them")
    options = parser.parse_args()
    try:
        check_names(configure(options.config, options.arguments))  # before the queue
    except UserError as error:
        sys.exit(f"submitit_job.py: {error}")
    executor = submitit.AutoExecutor(folder=options.logs, cluster=options.cluster)
    executor.update_parameters(
        nodes=options.nodes,
        tasks_per_node=options.ranks,
        gpus_per_node=options.gpus,
        timeout_min=options.minutes,
        slurm_srun_args=[f"--mpi={options.mpi}", "--wait=30"],
        # Ranks without MPI sign with it what they send each other (docs/clusters.md). The job makes
        # it: others may read its script.
        slurm_setup=["export HVDTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"],
    )
    job = executor.submit(train, options.config, options.arguments)
    print(f"job {job.job_id}: {job.paths.stdout}", flush=True)
    print(job.results()[0])


if __name__ == "__main__":
    main()
