"""data.columns: columns of text, dates and missing cells in a table become numbers."""

from __future__ import annotations

from hvdtrain.config.exclusion import Exclusion, among
from hvdtrain.features.data import INPUTS
from hvdtrain.features.job_feature import JobFeature
from hvdtrain.features.of_extras import Added, AddedRows

COLUMNS = JobFeature(
    key="data.columns",
    is_value=True,  # an option of tables, as data.missing and data.rare
    on=lambda config: config.data.options.get("columns") is not None,
    chosen=lambda config: "data.columns",
    examples=("data.name=csv data.columns=auto data.missing=mean",),
    excludes=tuple(
        Exclusion(
            "task.name",
            among(task),
            what=f"{{chosen}} makes numbers x of a table, but {{set}} needs {needed}",
            where="data.columns",
            fix="another task, or leave data.columns out",
            why=f"columns of a table become numbers, not {needed}",
        )
        for task, needed in (("language", "tokens"), ("segmentation", "images"))
    ),
)

FEATURES = (Added((COLUMNS,), behind=INPUTS),)
ROWS: tuple[AddedRows, ...] = ()
