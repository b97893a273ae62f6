"""The files of each split of a stored data set."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Finds the files of each split of stored data, and notices if one of them changes.",
)
