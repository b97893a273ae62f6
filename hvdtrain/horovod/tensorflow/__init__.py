"""Horovod's API for TensorFlow on the engines of hvdtrain: `import hvdtrain.horovod.tensorflow as hvd`."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError("hvdtrain.horovod.tensorflow needs TensorFlow\n  fix: pip install 'hvdtrain[tensorflow]'")
