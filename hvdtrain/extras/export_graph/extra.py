"""What the rest of hvdtrain learns of files that contain a model's computation."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Exports a model with its computation, as .pt2 of torch.export or .onnx.",
    model_files=dict.fromkeys((".pt2", ".onnx"), "hvdtrain.extras.export_graph.command"),
)
