"""Pipeline parallelism: the layers of a model are on several ranks, and micro-batches pass through
them one after the other."""

from hvdtrain.core.extras import Extra, Mode

_USAGE = """\
hvdtrain plan --pipeline [--ranks 2] [--json [FILE]] [key=value ...]
  instead: the time of each unit of the model, measured in this process; where parallel.balance cuts it into the stages of
  parallel.pipeline (or --ranks, default 2); how long the ranks of each parallel.schedule wait"""  # noqa: E501
EXTRA = Extra(
    status="stable",
    says="Divides a model's layers among ranks as the stages of a pipeline.",
    needs=("divided",),
    modes={"plan --pipeline": Mode("hvdtrain.extras.pipeline.plan", _USAGE)},
)
