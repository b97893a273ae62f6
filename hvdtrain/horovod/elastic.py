"""hvd.elastic: a training function that goes on from its last commit when a rank is lost, on the ranks that are left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvdtrain.horovod import sampler, state
from hvdtrain.horovod.basics import init, recover, shutdown
from hvdtrain.horovod.engine.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.sampler import ElasticSampler
from hvdtrain.horovod.state import ObjectState, State, TorchState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function whose first argument is a State: func(state, ...).

    The state is synchronized before each call. When a rank is lost the others go back to their last commit, leave it out, and call the
    function again. That needs an engine that goes on without a rank: mpi under `mpirun --with-ft ulfm`, or torchdist without torchrun's own
    elasticity (docs/elastic.md). On others the error ends the job, as it does without elastic.run.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        JOB.be_elastic()
        is_synchronized = False
        while True:
            try:
                if not is_synchronized:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                recover(error)
                state.restore()
                is_synchronized = False
            except HostsUpdatedInterrupt as interrupt:
                is_synchronized = interrupt.skip_sync
            state.on_reset()

    return wrapper


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "sampler", "shutdown", "state"]
