"""The registration of model.weights as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Loads pretrained weights of files, folders and other runs.",
    implements={"model.weights": "hvdtrain.extras.pretrained.load"},
)
