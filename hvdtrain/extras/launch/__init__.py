"""`launch`: starts ranks with the MPI or SLURM of this machine, again and again with --elastic."""

from hvdtrain.core.extras import Command, Extra, Mode

EXTRA = Extra(
    status="stable",
    says="Starts ranks with the MPI or SLURM of this machine, and restarts a job after a failure.",
    commands={
        "launch": Command(
            "hvdtrain.extras.launch.command",
            "hvdtrain launch -np 8 [-H n1:4,n2:4] -- [key=value ...]  "
            "starts the job with the local MPI or SLURM; --dry-run prints how",
            trains=True,
            listed_at=220,
        )
    },
    modes={
        "train --num-nodes": Mode(
            "hvdtrain.extras.launch.by_hand",
            "hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500 [key=value ...]"
            "    by hand on each node, without MPI\n"
            "  --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500   "
            "without a launcher: on each host, with its --node-id",
            ("--node-id", "--num-gpus"),
            listed_at=610,
        )
    },
)
