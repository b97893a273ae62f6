"""hvdtrain.horovod.mxnet is not built: importing it says why, and what to use instead."""

from hvdtrain.horovod.not_built import refuse_import

refuse_import(__name__)
