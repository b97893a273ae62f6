"""Where horovod.tensorflow.compression has what makes gradients smaller on the wire."""

from hvdtrain.horovod.call import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
