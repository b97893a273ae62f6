"""hvdtrain.horovod.tensorflow is not built: importing it says what to use instead."""

what = "hvdtrain.horovod.tensorflow is not built"
fix = "import hvdtrain.horovod as hvd, in a PyTorch or JAX script (docs/horovod-api.md)"
raise ImportError(f"{what}\n  fix: {fix}")
