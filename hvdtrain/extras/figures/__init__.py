"""The colours, axes and PNG output of figures, for other extras and for the labs."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Draws the figures of other extras, and writes them as PNG.",
)
