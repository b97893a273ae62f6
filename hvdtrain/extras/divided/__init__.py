"""What the ways to divide a model among ranks share: its layers, its creation in parts, the owners
of its training state."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides a model among ranks: what the extras for several ways to do so have in common.",
)
