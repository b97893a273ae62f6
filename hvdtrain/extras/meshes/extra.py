"""What the rest of hvdtrain learns of plan --parallel and plan --pipeline."""

from hvdtrain.config.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Compares the ways to divide ranks and model, and where stages may be cut.",
    plans={
        "pipeline": Command(
            "hvdtrain.extras.meshes.plan",
            """\
  --pipeline                 the time of each unit of the model, measured in this process; where parallel.balance cuts it into the stages of
                             parallel.pipeline (or --ranks, default 2); how long the ranks of each parallel.schedule wait""",  # noqa: E501
        ),
        "parallel": Command(
            "hvdtrain.extras.meshes.plan",
            """\
hvdtrain plan --parallel [--ranks 4] [--memory 16GiB] [--json [FILE]] [key=value ...]
  instead: the ways to divide ranks and model (parallel.tensor, parallel.pipeline, parallel.dense, shard.stage), by the predicted time of a
  step, with what each computes, sends, waits and keeps; which to take and why; which cannot be, and why
  --gflops 50                floating-point operations of a rank in a second while all compute, in 10^9
  --inside 10GB/s,5us        bandwidth and latency between the ranks of a node
  --between 1.25GB/s,30us    those of a node to the others, shared by its ranks
  --ranks-per-node 8         ranks on a node
  --measured FILE,FILE       these numbers from JSON of bench step (of ranks that each have the whole model) and of bench allreduce""",  # noqa: E501
        ),
    },
)
