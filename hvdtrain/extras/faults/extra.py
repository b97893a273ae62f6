"""What the rest of hvdtrain learns of plan --faults."""

from hvdtrain.config.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Predicts the share of time that moves a job of many ranks, some of which fail.",
    plan={
        "faults": Command(
            "hvdtrain.extras.faults.plan",
            """\
  --faults [KEY=VALUE,...]   the share of time that moves the job on 8 to 8,192 ranks, where a fault stops it, restarts it or takes a rank;
                             rank_mtbf_hours, checkpoint_s, sync_s, detect_s, restart_s, reform_s, requeue_s, repair_s, seed""",  # noqa: E501
        )
    },
)
