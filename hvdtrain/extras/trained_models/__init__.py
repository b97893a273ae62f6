"""The model of a run: its checkpoint, its task, and what it computes for other data. Commands that
use a trained model need it."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Loads a run's model: hvdtrain.predict() and evaluate(), and commands that need it.",
    implements={
        "hvdtrain.predict()": "hvdtrain.extras.trained_models.asked",
        "hvdtrain.evaluate()": "hvdtrain.extras.trained_models.asked",
    },
)
