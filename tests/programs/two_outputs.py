import numpy as np
import torch

import hvdtrain


class Normal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = torch.nn.Linear(3, 32), torch.nn.Linear(32, 2)

    def forward(self, x):
        return self.heads(torch.tanh(self.body(x))).unbind(1)  # mean and logarithm of the deviation, (n,) each


def likelihood(outputs, batch):
    mean, log_deviation = outputs
    return log_deviation + 0.5 * ((batch["y"] - mean) / log_deviation.exp()) ** 2


random = np.random.default_rng(0)
x = random.uniform(-1, 1, (2000, 3))
data = {"x": x, "y": x.sum(1) + random.normal(size=2000) * (0.1 + x[:, 0] ** 2)}
config = {"epochs": 5, "optim": {"name": "adam", "base_lr": 0.01}, "data.val_share": 0.1}
run = hvdtrain.train(config, "run=run", model=Normal(), train_data=data, loss=likelihood)
