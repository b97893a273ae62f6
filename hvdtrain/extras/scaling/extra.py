"""What the rest of hvdtrain learns of bench scaling."""

from hvdtrain.config.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Runs a job on 1, 2, 4 ranks, and predicts its speed on many ranks and other links.",
    benches={
        "scaling": Command(
            "hvdtrain.extras.scaling.command",
            """\
hvdtrain bench scaling [--config FILE] [key=value ...] real jobs on 1, 2, 4 ranks, and a prediction for many ranks
    --ranks 1,2,4             numbers of ranks
    --weak, --strong          keep batch.per_rank, or keep batch.size; default: both
    --steps 60                steps of each job; the first sixth is warm-up
    --repeat 1                runs of each job; all jobs run in turn
    --links nvlink:5us:300GB/s,ib:2us:25GB/s   links inside a node and between nodes to predict for; default: the link measured here
    --per-node 8              ranks on a node, for the prediction
    --limit 300               seconds that one job may take
    --png FILE                a picture of efficiency and prediction""",  # noqa: E501
        )
    },
)
