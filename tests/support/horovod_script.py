"""A script as Horovod's users write them, for any module with Horovod's names: python
tests/support/horovod_script.py MODULE OUT.json"""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd = importlib.import_module(sys.argv[1])
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

made = torch.Generator().manual_seed(0)
centers = torch.randn(10, 1, 8, 8, generator=made)
labels = torch.arange(400) % 10
images = centers[labels] + torch.randn(400, 1, 8, 8, generator=made)
dataset = TensorDataset(images[:320], labels[:320])
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)


class Net(nn.Module):
    """A convolution, batch norm, two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dense1 = nn.Linear(8 * 3 * 3, 32)
        self.dense2 = nn.Linear(32, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 2)
        return self.dense2(functional.relu(self.dense1(x.flatten(1))))


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if "--fp16" in sys.argv else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
)
losses = []
for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    losses.append(metric_average(loss.item(), "loss"))
model.eval()
with torch.no_grad():
    right = (model(images[320:]).argmax(1) == labels[320:]).float().mean().item()
losses.append(metric_average(right, "accuracy"))
if hvd.rank() == 0:
    Path(sys.argv[2]).write_text(json.dumps(losses))
