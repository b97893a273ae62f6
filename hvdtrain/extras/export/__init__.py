"""hvdtrain export: the weights of a run, or its model with them, for other software."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Writes a run's weights or model for other software: safetensors, torch.export, ONNX, ...",
    needs=("trained_models",),
    commands={
        "export": Command(
            "hvdtrain.extras.export.command",
            "hvdtrain export RUN --to FILE                            "
            "weights for inference elsewhere: model.safetensors, or model.pt",
            listed_at=500,
        ),
    },
)
