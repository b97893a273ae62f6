"""hvdtrain.horovod.mxnet is not available: importing it raises an error with the reason and the
alternative."""

from hvdtrain.horovod.not_built import refuse_import

refuse_import(__name__)
