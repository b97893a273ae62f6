"""Where horovod.torch.elastic has what hvd.elastic has."""

from hvdtrain.horovod.elastic import *  # noqa: F403
