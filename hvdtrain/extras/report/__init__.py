"""hvdtrain report: one run, or several side by side, as an HTML page and pictures."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Shows one run, or several side by side, as an HTML page with figures.",
    needs=("compare", "figures"),
    commands={
        "report": Command(
            "hvdtrain.extras.report.command",
            "hvdtrain report RUN [RUN ...] [--to FOLDER]              "
            "a page with figures of one or several jobs: running, done or killed",
            listed_at=510,
            shows_run=True,
        )
    },
)
