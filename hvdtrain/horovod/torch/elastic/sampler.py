"""Where horovod.torch.elastic.sampler has the sampler."""

from hvdtrain.horovod.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
