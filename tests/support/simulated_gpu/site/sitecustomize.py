"""Read by each Python that starts under `python -m simulated_gpu`: its torch has simulated GPUs."""

import os
import sys

if "SIMULATED_GPUS" in os.environ:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    from simulated_gpu.load import start_with_torch

    start_with_torch()
