"""What a script has of JAX before prepare(): its start, its device, and its lines in messages.
Without JAX, until init() starts it."""

from __future__ import annotations

from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.own_loop import Words

WORDS = Words(
    prepare="params, state = ctx.prepare(params, optax.adamw(1e-3))",
    one="one tree of all parameters, with optax.multi_transform() for what is updated by other "
    "rules",
    gradient="loss, gradient = ctx.value_and_grad(loss_of)(params, batch)",
    step="params, state = ctx.update(gradient, state, params)",
    resume="params, state, kept = ctx.resume(params, state)",
    parts="ctx.value_and_grad(loss_of, at_most=SAMPLES)(params, batch)",
    counted="ctx.value_and_grad(loss_of, has_count=True)(params, batch), where loss_of returns "
    "(loss, N)",
)


def begin(config: Config, communicator: Communicator) -> None:
    """Starts JAX with this rank's part of the cores, where the script has not started it before.
    Every rank calls it.

    What the script makes lies on this rank's device from here on. Raises UserError where JAX is
    missing, or the device.
    """
    from hvdtrain.frameworks.jax.build import load_jax, start_threads

    jax = load_jax(config.where("framework"))
    start_threads(jax, communicator)
    device = pick_device(config, communicator)
    if device != jax.local_devices()[0]:
        jax.config.update("jax_default_device", device)


def pick_device(config: Config, communicator: Communicator) -> Any:
    """The jax.Device of this rank."""
    from hvdtrain.frameworks.jax.build import load_jax
    from hvdtrain.frameworks.jax.build import pick_device as device_of

    return device_of(load_jax(config.where("framework")), config, communicator)
