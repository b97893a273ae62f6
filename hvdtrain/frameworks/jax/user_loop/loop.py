"""JaxLoop: JAX for a custom loop. Its methods import JAX, not this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.jax.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import UserLoop


class JaxLoop(UserLoop):
    """Custom loops with a tree of parameters and an optax transformation."""

    words = WORDS

    def begin(self, config: Config, communicator: Communicator) -> None:
        """Starts JAX with this rank's share of the cores and its devices, unless the script has
        already started it. Every rank calls it.

        From then on, the script's arrays are created on this rank's device. Raises UserError if JAX
        or the device is missing.
        """
        from hvdtrain.frameworks.jax.build import load_jax
        from hvdtrain.frameworks.jax.start import start_jax

        jax = load_jax(config.where("framework"))
        start_jax(jax, config, communicator)
        device = self.device(config, communicator)
        if device != jax.local_devices()[0]:
            jax.config.update("jax_default_device", device)

    def device(self, config: Config, communicator: Communicator) -> Any:
        """Returns the jax.Device of this rank."""
        from hvdtrain.frameworks.jax.build import load_jax
        from hvdtrain.frameworks.jax.build import pick_device as device_of

        return device_of(load_jax(config.where("framework")), config, communicator)

    def learner_class(self) -> Callable[..., Any]:
        from hvdtrain.frameworks.jax.user_loop.loop_learner import JaxLoopLearner

        return JaxLoopLearner

    def extra(self) -> Any:
        from hvdtrain.frameworks.jax.user_loop import extra

        return extra


LOOP = JaxLoop()
