"""Where horovod.torch.elastic has what hvd.elastic has."""

from hvdtrain.horovod.elastic import *  # noqa: F403
from hvdtrain.horovod.torch.elastic import sampler as sampler
from hvdtrain.horovod.torch.elastic import state as state
