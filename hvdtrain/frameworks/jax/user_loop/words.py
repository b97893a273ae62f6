"""Example lines of a custom loop in JAX, for messages."""

from __future__ import annotations

from hvdtrain.frameworks.user_loop import Words

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
