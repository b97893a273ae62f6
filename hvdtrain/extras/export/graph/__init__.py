"""hvdtrain export RUN --to model.pt2 or model.onnx."""
