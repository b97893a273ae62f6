"""Fine-tuning: model.weights loads the weights of a file or folder, model.lora adds adapters."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Loads weights of files, folders and other runs, and trains low-rank adapters (LoRA).",
    implements={
        "model.weights": "hvdtrain.extras.pretrained.load",
        "model.lora": "hvdtrain.extras.pretrained.lora",
    },
)
