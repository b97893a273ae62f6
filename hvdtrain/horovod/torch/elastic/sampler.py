"""Where horovod.torch.elastic.sampler has the sampler."""

from hvdtrain.horovod.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
