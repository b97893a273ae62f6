"""hvdtrain: trains deep networks on many workers, with Horovod or MPI between them and any framework inside one."""

from hvdtrain.api import Run as Run
from hvdtrain.api import read as read
from hvdtrain.api import (
    train as train,  # the function hides the package hvdtrain.train: import from its modules, from hvdtrain.train.job ...
)
from hvdtrain.errors import UserError as UserError
from hvdtrain.version import __version__ as __version__
