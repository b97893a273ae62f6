"""hvdtrain.horovod.mxnet is not built: importing it says why, and what to use instead."""

what = "hvdtrain.horovod.mxnet is not built: Apache MXNet was retired in 2023"
fix = "hvdtrain.horovod for torch, hvdtrain.horovod.keras or hvdtrain.horovod.tensorflow (docs/horovod-api.md)"
raise ImportError(f"{what}\n  fix: {fix}")
