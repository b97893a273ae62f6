"""Arrays: which of two rings a point belongs to.   mpirun -np 2 python arrays.py"""

import numpy as np

import hvdtrain


def rings(split):
    random = np.random.default_rng(["train", "val"].index(split))
    label = random.integers(0, 2, 600)
    angle, radius = random.uniform(0, 2 * np.pi, 600), 1 + label + random.normal(0, 0.1, 600)
    return {"x": np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), "y": label}


run = hvdtrain.train({"data.name": rings, "model.name": "mlp", "optim.base_lr": 0.5, "epochs": 4})
