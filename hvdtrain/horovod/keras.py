"""hvdtrain.horovod.keras is not built: importing it says what to use instead."""

what = "hvdtrain.horovod.keras is not built"
fix = "Keras on the torch or JAX backend: import hvdtrain.horovod as hvd, and its calls on tensors or arrays (docs/horovod-api.md)"
raise ImportError(f"{what}\n  fix: {fix}")
