"""A custom loop in JAX, as the ranks of this start make it in one way after the other; and a
plain loop of JAX and optax."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hvdtrain as ht
from hvdtrain.data.sampler import positions_of_rank

SAMPLES = 50
STEPS = 12
X = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 6))
DATA = {"x": X, "y": X.prod(1)}
OPTIMIZERS = {
    "sgd": optax.sgd(0.2, 0.9),
    "adamw": optax.adamw(optax.linear_schedule(0.05, 0.01, STEPS), weight_decay=0.1),
    "chain": optax.chain(
        optax.clip_by_global_norm(0.1), optax.inject_hyperparams(optax.adam)(0.03)
    ),
}


def start(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    first = {"w": rng.normal(size=(6, 8)), "b": rng.normal(size=8)}
    return {"first": first, "rest": [jnp.asarray(rng.normal(size=(8, 1)))]}


def loss_of(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return jnp.square((hidden @ params["rest"][0])[:, 0] - y).mean()


def named(params: Any) -> dict[str, list[Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(array).tolist() for path, array in paths}


def plain(optimizer: str, batch: int) -> dict[str, Any]:
    """In one process, each step on the whole batch, by JAX and optax alone."""
    with jax.enable_x64(True):
        transformation = OPTIMIZERS[optimizer]
        params = jax.tree.map(jnp.asarray, start())
        losses = []
        # float32 of a schedule rounds otherwise without jit
        state = transformation.init(params)
        update = jax.jit(transformation.update)
        for step in range(STEPS):
            rows = positions_of_rank(batch * step, batch, 0, 1, SAMPLES, 1).samples
            loss, gradient = jax.value_and_grad(loss_of)(params, (X[rows], DATA["y"][rows]))
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
        return {"losses": losses, "weights": named(params)}


COUNTED = DATA | {
    "counts": np.random.default_rng(1).integers(0, 2, (SAMPLES, 3)).astype(float)
    * (np.arange(SAMPLES) % 3 > 0)[:, None]
}


def counted_loss_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the mean over the items that count in the batch, NaN if none counts, and their
    number."""
    hidden = jnp.tanh(batch["x"] @ params["first"]["w"] + params["first"]["b"])
    squares = jnp.square(hidden @ params["rest"][0] - batch["y"][:, None])
    return (squares * batch["counts"]).sum() / batch["counts"].sum(), batch["counts"].sum()


def counted(size: int, *words: str) -> float:
    """The largest difference between a loop of such means and one of JAX and optax with whole
    batches."""
    with jax.enable_x64(True), ht.init("framework=jax", *words) as ctx:
        transformation = optax.sgd(0.2, 0.9)
        params, state = ctx.prepare(start(), transformation)
        expected = jax.tree.map(jnp.asarray, start())
        expected_state = transformation.init(expected)
        for batch in ctx.samples(COUNTED, batch=size, epochs=0.4, seed=1):
            loss, gradient = ctx.value_and_grad(
                counted_loss_of, has_count=True, at_most=1 + batch.step % 2
            )(params, batch)
            params, state = ctx.update(gradient, state, params)
            rows = positions_of_rank(size * batch.step, size, 0, 1, SAMPLES, 1).samples
            whole = {name: jnp.asarray(array[rows]) for name, array in COUNTED.items()}
            (of_all, _), gradient = jax.value_and_grad(counted_loss_of, has_aux=True)(
                expected, whole
            )
            updates, expected_state = transformation.update(gradient, expected_state, expected)
            expected = optax.apply_updates(expected, updates)
            np.testing.assert_allclose(ctx.mean({"loss": loss})["loss"], of_all, rtol=1e-12)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
        return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def main(out: str, *ways: str) -> None:
    """ways: "OPTIMIZER BATCH STEPS key=value ..."; rank 0 writes what each gave."""
    with jax.enable_x64(True):
        results = [trained(*way.split()) for way in ways]
        if ways[0].startswith("sgd"):
            results[0]["counted"] = counted(5, *ways[0].split()[3:])
    if results[0]["rank"] == 0:
        Path(out).write_text(json.dumps(results))


def trained(optimizer: str, size: str, steps: str, *words: str) -> dict[str, Any]:
    batch_size = int(size)
    has_folder = any(word.startswith("run=") for word in words)
    with ht.init("framework=jax", "log.every_steps=4", "guard.equal_steps=4", *words) as ctx:
        # other parameters on each rank: rank 0's are used
        params, state = ctx.prepare(start(ctx.rank), OPTIMIZERS[optimizer])
        kept: dict[str, Any] = {}
        if has_folder:
            params, state, kept = ctx.resume(params, state)
        began = ctx.step
        losses = []
        counts = []
        keys = []
        for batch in ctx.samples(
            DATA, batch=batch_size, epochs=int(steps) * batch_size / SAMPLES, seed=1
        ):
            if batch.step % 3 == 2:  # in parts, equally many on all ranks
                loss, gradient = ctx.value_and_grad(loss_of, at_most=2)(params, batch)
            elif batch.step % 3 == 1:
                gradient, loss = ctx.grad(loss_of_fields, has_aux=True)(params, *batch)
            else:
                loss, gradient = ctx.value_and_grad(loss_of)(params, batch)
            params, state = ctx.update(gradient, state, params)
            losses.append(ctx.mean({"loss": loss})["loss"])
            counts.append(batch.count)
            keys.append(jax.random.key_data(batch.key).tolist())
            ctx.log(loss=loss)
            if has_folder:
                ctx.checkpoint(params, state, last=jnp.asarray(losses[-1]))
        squares = 0.0
        count = 0
        for batch in ctx.each(DATA, batch=9):
            squares = squares + float(loss_of(params, batch)) * batch.count
            count = count + batch.count
        evaluated = ctx.mean({"loss": squares / max(1, count)}, count=count)["loss"]
        of_ranks = ctx.mesh.world.allgather_object((counts, keys))
        return {
            "rank": ctx.rank,
            "began": began,
            "losses": losses,
            "weights": named(params),
            "evaluated": evaluated,
            "counts": [counts for counts, _ in of_ranks],
            "keys": [keys for _, keys in of_ranks],
            "kept": float(kept.get("last", math.nan)),
        }


def loss_of_fields(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns loss_of() of the separate fields, and the same value again as the additional
    result."""
    loss = loss_of(params, (x, y))
    return loss, loss
