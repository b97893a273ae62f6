"""JaxLoop: JAX for a script's own loop. Its methods import JAX, not this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks.jax.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import UserLoop


class JaxLoop(UserLoop):
    """A tree of parameters and a transformation of the kind of optax."""

    words = WORDS

    def begin(self, config: Config, communicator: Communicator) -> None:
        """Starts JAX with this rank's part of the cores, where the script has not started it
        before. Every rank calls it.

        What the script makes lies on this rank's device from here on. Raises UserError where JAX is
        missing, or the device.
        """
        from hvdtrain.frameworks.jax.build import load_jax, start_threads

        jax = load_jax(config.where("framework"))
        start_threads(jax, communicator)
        device = self.device(config, communicator)
        if device != jax.local_devices()[0]:
            jax.config.update("jax_default_device", device)

    def device(self, config: Config, communicator: Communicator) -> Any:
        """The jax.Device of this rank."""
        from hvdtrain.frameworks.jax.build import load_jax
        from hvdtrain.frameworks.jax.build import pick_device as device_of

        return device_of(load_jax(config.where("framework")), config, communicator)

    def learner(
        self,
        config: Config,
        mesh: Mesh,
        model: Any,
        optimizer: Any,
        on_step: Callable[[], None],
        example: Any,
    ) -> Any:
        from hvdtrain.frameworks.jax.user_loop.loop_learner import JaxLoopLearner

        return JaxLoopLearner(config, mesh, model, optimizer, on_step, example)

    def to_arrays(self, values: Mapping[str, Any]) -> Arrays:
        from hvdtrain.frameworks.jax.user_loop.extra import to_arrays

        return to_arrays(values)

    def from_arrays(self, arrays: Arrays) -> dict[str, Any]:
        from hvdtrain.frameworks.jax.user_loop.extra import from_arrays

        return from_arrays(arrays)


LOOP = JaxLoop()
