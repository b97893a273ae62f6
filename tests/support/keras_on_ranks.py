"""Training with hvdtrain.horovod.keras, checked against Keras alone in one process, as one program
for the ranks.

KERAS_BACKEND=torch|jax|tensorflow python tests/support/keras_on_ranks.py OUT.json        writes
{check: failure or ""}
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_layers_on_ranks
import numpy as np

import hvdtrain.horovod.keras as hvd
from hvdtrain.errors import UserError
from hvdtrain.horovod import allreduce_async, grouped_allgather, synchronize

# of a rank: rows of a batch
ROWS = 6
BATCHES = 4
BACKEND = keras.backend.backend()
NEAR = 1e-12
SGD = keras.optimizers.SGD


class Affine(keras.layers.Layer):
    """Dense in the dtype of its weights: on torch and JAX Keras multiplies matrices of float64 in
    float32."""

    def __init__(self, units: int, **of_keras: Any) -> None:
        super().__init__(**of_keras)
        self._units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self._units), initializer="glorot_normal")
        self.bias = self.add_weight(shape=(self._units,), initializer="zeros")

    def call(self, x: Any) -> Any:
        return keras.ops.sum(keras.ops.multiply(x[..., None], self.kernel), axis=-2) + self.bias


def model(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((5,)), Affine(7), keras.layers.Activation("tanh"), Affine(1)]
    )


def batches() -> tuple[np.ndarray, np.ndarray]:
    """(batches, ranks, rows, numbers)"""
    made = np.random.default_rng(3)
    x = made.normal(size=(BATCHES, hvd.size(), ROWS, 5))
    return x, np.tanh(x @ made.normal(size=(5, 1))) + 0.1 * made.normal(
        size=(BATCHES, hvd.size(), ROWS, 1)
    )


def fit(net: Any, optimizer: Any, *, whole: bool = False, epochs: int = 2, **options: Any) -> Any:
    """The history of fit(): on the batches of this rank, or of all of them."""
    x, y = (each if whole else each[:, hvd.rank() : hvd.rank() + 1] for each in batches())
    net.compile(optimizer=optimizer, loss="mse")
    rows = ROWS * x.shape[1]
    return net.fit(
        x.reshape(-1, 5),
        y.reshape(-1, 1),
        batch_size=rows,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    )


def weights(net: Any) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in net.weights]


def far(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def are_equal_on_ranks(values: list[np.ndarray]) -> None:
    for value, all_ranks in zip(
        values, grouped_allgather([value[None] for value in values]), strict=True
    ):
        assert (all_ranks == value).all(), "ranks differ"


def is_as_alone(
    make: Callable[[], Any],
    alone: Callable[[], Any] | None = None,
    near: float = NEAR,
    **options: Any,
) -> str:
    """Asserts that ranks end with the same bits, equal to one process's up to rounding. Returns the
    difference as text."""
    net = model()
    reference = model()
    fit(net, hvd.DistributedOptimizer(make(), **options))
    fit(reference, (alone or make)(), whole=True)
    assert far(weights(reference), weights(model())) > 0.01, "it did not train"
    are_equal_on_ranks(weights(net))
    distance = far(weights(net), weights(reference))
    assert distance < near, f"{distance} from one process"
    return f"{distance:.1e}"


def fit_with_sgd() -> str:
    return is_as_alone(
        lambda: SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1, weight_decay=0.01)
    )


def fit_with_adam() -> str:
    return is_as_alone(lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5, use_ema=True))


def fit_with_sums() -> str:
    return is_as_alone(lambda: SGD(0.05), lambda: SGD(0.05 * hvd.size()), op=hvd.Sum)


def fit_with_a_factor() -> str:
    return is_as_alone(lambda: SGD(0.05), gradient_predivide_factor=3.0)


def fit_in_16_bits_on_the_wire() -> str:
    return is_as_alone(lambda: SGD(0.05), near=1e-3, compression=hvd.Compression.fp16)


def accumulation_reduces_once_in_an_update() -> str:
    """Handles count the requests of a rank."""

    def handle() -> int:
        made = allreduce_async(np.zeros(1))
        synchronize(made)
        return made

    before = handle()
    found = is_as_alone(
        lambda: SGD(0.05, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.1)
    )
    requests = handle() - before - 1
    assert requests == 2 * (BATCHES // 2) + 1, (
        f"{requests} requests: one in each of 4 updates, and one to compare ranks"
    )
    return found


def passes_are_added_up() -> str:
    return is_as_alone(
        lambda: SGD(0.05),
        lambda: SGD(0.1, gradient_accumulation_steps=2),
        backward_passes_per_step=2,
    )


def passes_are_averaged() -> str:
    return is_as_alone(
        lambda: SGD(0.05),
        lambda: SGD(0.05, gradient_accumulation_steps=2),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )


def fit_eagerly() -> str:
    net = model()
    reference = model()
    for each, optimizer, rows in (
        (net, hvd.DistributedOptimizer(SGD(0.05)), slice(hvd.rank(), hvd.rank() + 1)),
        (reference, SGD(0.05), ...),
    ):
        x, y = (part[:, rows] for part in batches())
        each.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        each.fit(
            x.reshape(-1, 5),
            y.reshape(-1, 1),
            batch_size=ROWS * x.shape[1],
            shuffle=False,
            verbose=0,
        )
    are_equal_on_ranks(weights(net))
    distance = far(weights(net), weights(reference))
    assert distance < NEAR, distance
    return f"{distance:.1e}"


def a_loss_scale_leaves_out_a_step_on_all_ranks() -> str:
    """One of two batches is not finite, on the last rank."""
    x, y = (each[:2, hvd.rank()].copy() for each in batches())
    if hvd.rank() == hvd.size() - 1:
        x[0, 0, 0] = np.nan
    net = model()
    reference = model()
    scaled = keras.optimizers.LossScaleOptimizer(SGD(0.05), initial_scale=8.0)
    net.compile(optimizer=hvd.DistributedOptimizer(scaled), loss="mse")
    net.fit(x.reshape(-1, 5), y.reshape(-1, 1), batch_size=ROWS, shuffle=False, verbose=0)
    whole_x, whole_y = (each[1].reshape(-1, each.shape[-1]) for each in batches())
    reference.compile(optimizer=SGD(0.05), loss="mse")
    reference.fit(whole_x, whole_y, batch_size=len(whole_x), shuffle=False, verbose=0)
    are_equal_on_ranks(weights(net))
    assert (
        float(keras.ops.convert_to_numpy(net.optimizer.dynamic_scale)) == 4.0
        and int(net.optimizer.iterations) == 1
    )
    distance = far(weights(net), weights(reference))
    assert distance < NEAR, distance
    return f"{distance:.1e}"


def mixed_precision_gets_a_loss_scale() -> str:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = model()
        fit(net, hvd.DistributedOptimizer(SGD(0.05)))
        assert isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer)
        are_equal_on_ranks(weights(net))
        unscaled = hvd.DistributedOptimizer(SGD(0.05, loss_scale_factor=1.0))
        refused(
            "a LossScaleOptimizer around a DistributedOptimizer skips",
            lambda: net.compile(optimizer=unscaled, loss="mse"),
        )
    finally:
        keras.config.set_dtype_policy(before)
    return ""


def metrics_are_averaged() -> str:
    alone = model()
    together = model()
    own = fit(alone, SGD(0.0)).history["loss"]
    found = fit(together, SGD(0.0), callbacks=[hvd.callbacks.MetricAverageCallback()]).history[
        "loss"
    ]
    expected = hvd.allgather(np.array([own])).mean(0)
    assert hvd.size() == 1 or abs(own[0] - expected[0]) > 1e-3, "ranks have the same loss"
    assert np.abs(np.array(found) - expected).max() < 1e-6 and found == hvd.broadcast_object(found)
    return f"{own[0]:.4f} here, {found[0]:.4f} of all ranks"


class OneWeight(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.weight


def warmup_changes_rate_and_momentum() -> str:
    """Gradient of mean(weight * 2 - 0) squared: by hand 8 weight."""
    net = keras.Sequential([keras.Input((1,)), OneWeight()])
    net.compile(optimizer=hvd.DistributedOptimizer(SGD(0.01, momentum=0.9)), loss="mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2, verbose=0)
    history = net.fit(
        np.full((6, 1), 2.0),
        np.zeros((6, 1)),
        batch_size=2,
        epochs=3,
        verbose=0,
        callbacks=[warmup],
    ).history
    size = hvd.size()
    weight = 1.0
    velocity = 0.0
    before = 0.01
    rates = [
        0.01 / size * (1 + (step + 1) / 3 * (size - 1) / 2) if step < 6 else 0.01
        for step in range(9)
    ]
    for rate in rates:
        velocity = 0.9 * velocity * rate / before - rate * 8 * weight
        weight = weight + velocity
        before = rate
    assert np.allclose(history["lr"], [rates[2], rates[5], rates[8]], rtol=1e-6), history["lr"]
    found = float(keras.ops.convert_to_numpy(net.layers[-1].weight))
    assert abs(found - weight) < 1e-6, (found, weight)  # Keras has rates in float32
    return f"{abs(found - weight):.1e}"


class Rates(keras.callbacks.Callback):
    """The rate of each step."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(hvd.callbacks.rate_of(self.model.optimizer))


def schedules_have_the_rates_of_horovod() -> str:
    """By the formulas of 0.28.1, in each step: a number is the factor of an epoch since
    start_epoch, a function gets the epoch."""
    schedule = hvd.callbacks.LearningRateScheduleCallback
    steps = BATCHES
    cases: tuple[tuple[dict[str, Any], Callable[[int], float]], ...] = (
        (
            {"multiplier": 0.1, "start_epoch": 1, "end_epoch": 4},
            lambda step: 0.1 ** min(max(step // steps - 1, 0), 2),
        ),
        (
            {"multiplier": 0.1, "start_epoch": 1, "staircase": False},
            lambda step: 0.1 ** max(step / steps - 1, 0),
        ),
        ({"multiplier": lambda epoch: 0.5**epoch}, lambda step: 0.5 ** (step // steps)),
        (
            {
                "multiplier": lambda epoch: 1 / (1 + epoch),
                "staircase": False,
                "steps_per_epoch": steps,
            },
            lambda step: 1 / (1 + step / steps),
        ),
    )
    for options, factor in cases:
        rates = Rates()
        history = fit(
            model(),
            hvd.DistributedOptimizer(SGD(0.1)),
            epochs=5,
            callbacks=[schedule(0.1, **options), rates],
        ).history
        expected = [0.1 * factor(step) for step in range(5 * steps)]
        assert np.allclose(rates.found, expected, rtol=1e-6), (options, rates.found, expected)
        assert np.allclose(history["lr"], expected[steps - 1 :: steps], rtol=1e-6)
    return ""


def an_optimizer_is_made_from_its_config() -> str:
    """The copy also reduces gradients."""
    for optimizer in (
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.02, clipnorm=0.5)),
        hvd.DistributedOptimizer(SGD(0.05), backward_passes_per_step=2),
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(SGD(0.05), initial_scale=8.0)),
    ):
        copy = type(optimizer).from_config(optimizer.get_config())
        assert copy.get_config() == optimizer.get_config()
        nets = [model(), model()]
        for net, each in zip(nets, (optimizer, copy), strict=True):
            fit(net, each)
        are_equal_on_ranks(weights(nets[1]))
        assert far(*map(weights, nets)) == 0.0
    return ""


def numpy_scalars_are_averaged() -> str:
    rank = hvd.rank()
    size = hvd.size()
    for value in (np.mean([1.0, 2.0]), np.float32(3), np.int64(4)):
        found = hvd.allreduce(value + value.dtype.type(2 * rank), op=hvd.Sum)
        assert found.dtype == value.dtype and float(found) == size * float(value) + size * (
            size - 1
        )
        assert int(hvd.broadcast(value.dtype.type(5 + rank), 0)) == 5
    refused("there is no axis 0", lambda: hvd.allgather(np.float32(1.0)))
    refused("there is no axis 0", lambda: hvd.alltoall(np.float32(1.0)))
    whole, ctx = hvd.Compression.fp16.compress(keras.ops.convert_to_tensor([1.0, 2.0]))
    assert type(whole) is type(keras.ops.convert_to_tensor([1.0])) and "float16" in str(whole.dtype)
    same(hvd.Compression.fp16.decompress(whole, ctx), np.array([1.0, 2.0]))
    return ""


def moving_statistics_are_averaged_as_the_page_says() -> str:
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), Affine(1)])
    fit(net, hvd.DistributedOptimizer(SGD(0.05)))
    before = [np.array(keras.ops.convert_to_numpy(each)) for each in net.non_trainable_weights]
    for weight in net.non_trainable_weights:
        weight.assign(hvd.allreduce(weight))
    after = [np.array(keras.ops.convert_to_numpy(each)) for each in net.non_trainable_weights]
    are_equal_on_ranks(after)
    assert far(before, after) > 1e-3, "ranks had the same statistics"
    means = [each.mean(0) for each in grouped_allgather([each[None] for each in before])]
    assert far(after, means) < 1e-12
    return ""


def the_first_rank_begins() -> str:
    net = model(seed=10 + hvd.rank())
    start = hvd.broadcast_object(weights(net))
    assert hvd.rank() == 0 or far(weights(net), start) > 0.01
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.0 if hvd.rank() == 0 else 0.5))
    fit(net, optimizer, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert far(weights(net), start) == 0.0 and hvd.callbacks.rate_of(net.optimizer) == 0.0
    return ""


def the_first_rank_begins_where_weights_come_with_data() -> str:
    keras.utils.set_random_seed(10 + hvd.rank())
    net = keras.Sequential([Affine(7), Affine(1)])
    rows = [each[:, hvd.rank()].reshape(-1, each.shape[-1]) for each in batches()]
    net.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    given = (
        (rows[0][at : at + ROWS], rows[1][at : at + ROWS]) for at in range(0, len(rows[0]), ROWS)
    )
    net.fit(given, steps_per_epoch=BATCHES, verbose=0, callbacks=callbacks)
    are_equal_on_ranks(weights(net))
    return f"{len(net.weights)} weights"


def a_saved_model_goes_on() -> str:
    path = Path(hvd.broadcast_object(tempfile.mkdtemp()), "model.keras")
    keras.saving.get_custom_objects()["Affine"] = Affine
    straight = model()
    net = model()
    fit(straight, hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), epochs=4)
    fit(
        net,
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)),
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.BestModelCheckpoint("loss", filepath=path),
        ],
    )
    hvd.barrier()
    loaded = hvd.load_model(path)
    x, y = (each[:, hvd.rank()] for each in batches())
    loaded.fit(
        x.reshape(-1, 5), y.reshape(-1, 1), batch_size=ROWS, epochs=2, shuffle=False, verbose=0
    )
    assert far(weights(loaded), weights(straight)) < NEAR
    loaded.compile(keras.optimizers.SGD(0.1), loss=keras.losses.MeanSquaredError())
    loaded.train_on_batch(x[0], y[0])
    loaded.save(path.with_suffix(f".{hvd.rank()}.h5"))
    refused(
        "loads this optimizer without its variables",
        lambda: hvd.load_model(path.with_suffix(f".{hvd.rank()}.h5")),
    )
    assert type(keras.saving.load_model(path).optimizer).__mro__[1].__name__ != "Reducing"
    return ""


def calls_are_those_of_all_ranks() -> str:
    rank = hvd.rank()
    size = hvd.size()
    for compiled in (False, True):
        call = in_graph if compiled else lambda work, *given: work(*given)
        x = keras.ops.convert_to_tensor(np.arange(4.0)[:, None] + 10 * rank)
        all_rows = np.concatenate([np.arange(4.0)[:, None] + 10 * other for other in range(size)])
        mean = all_rows.reshape(size, 4, 1).mean(0)
        same(call(lambda x: hvd.allreduce(x, name="mean"), x), mean)
        same(
            call(lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0), x),
            2 * np.arange(4.0)[:, None] + 20 * (size - 1),
        )
        same(call(hvd.allgather, x), all_rows)
        same(
            call(lambda x: hvd.broadcast(x, size - 1), x), np.arange(4.0)[:, None] + 10 * (size - 1)
        )
        share = 4 // size
        same(call(hvd.reducescatter, x), mean[rank * share : (rank + 1) * share])
        same(call(hvd.alltoall, x), all_rows.reshape(size, size, share, 1)[:, rank].reshape(-1, 1))
    x = keras.ops.convert_to_tensor(np.arange(rank + 1.0))
    same(
        hvd.broadcast(2 + rank, 0),
        np.array(2, keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(2)).dtype),
    )
    same(
        hvd.allgather([1.0 * rank]),
        np.arange(1.0 * size).astype(
            keras.ops.convert_to_numpy(keras.ops.convert_to_tensor([1.0])).dtype
        ),
    )
    same(hvd.allgather(x), np.concatenate([np.arange(other + 1.0) for other in range(size)]))
    rows, received = hvd.alltoall(x, splits=[1] + [0] * (size - 2) + [rank])
    assert [int(n) for n in received] == (
        [1] * size if rank == 0 else list(range(size)) if rank == size - 1 else [0] * size
    )
    of_last = np.concatenate([np.arange(1.0, other + 1) for other in range(size)])
    same(rows, np.zeros(size) if rank == 0 else of_last if rank == size - 1 else np.zeros(0))
    return ""


def in_graph(work: Callable[..., Any], *given: Any) -> Any:
    """The work in a function that the backend compiles; on torch called as it is."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(work)(*given)
    if BACKEND == "jax":
        import jax

        return jax.jit(work)(*given)
    return work(*given)


def same(found: Any, expected: np.ndarray) -> None:
    array = keras.ops.convert_to_numpy(found)
    assert type(found) is type(keras.ops.convert_to_tensor(expected)), type(found)
    assert array.shape == expected.shape and np.abs(array - expected).max(initial=0.0) < NEAR, (
        array,
        expected,
    )


def errors_say_what_to_do() -> str:
    for arguments, text in (
        (
            {"device_dense": "/cpu:0"},
            "device_dense='/cpu:0' has no effect: .*\n  fix: the call without device_dense",
        ),
        ({"groups": 2}, "groups=2 has no effect"),
        ({"op": 2}, "op=2 is not supported: gradients can only be averaged or summed here"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor not supported with op != Average",
        ),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
    ):
        refused(text, lambda: hvd.DistributedOptimizer(SGD(0.1), **arguments))  # noqa: B023 (called at once)
    refused(
        "is already a DistributedOptimizer",
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(SGD(0.1))),
    )
    accumulating = SGD(0.1, gradient_accumulation_steps=2)
    refused(
        "both backward_passes_per_step=3 and the optimizer's gradient_accumulation_steps=2",
        lambda: hvd.DistributedOptimizer(accumulating, backward_passes_per_step=3),
    )
    refused("builtins.dict is not a Keras 3 optimizer", lambda: hvd.DistributedOptimizer({}))
    built = SGD(0.1)
    built.build(model().trainable_variables)
    refused(
        "was built without gradient accumulation",
        lambda: hvd.DistributedOptimizer(built, backward_passes_per_step=2),
    )
    net = model()
    local = hvd.PartialDistributedOptimizer
    refused(
        "All local layers must be of keras.layers.Layer type",
        lambda: local(SGD(0.1), local_layers=[1]),
    )
    refused(
        "these local layers have no variables yet: late",
        lambda: local(SGD(0.1), local_layers=keras.layers.Dense(1, name="late")),
    )
    scaled = keras.optimizers.LossScaleOptimizer(SGD(0.1))
    refused("ranks would skip different steps", lambda: local(scaled, local_layers=net.layers[0]))
    refused(
        "a local variable is a builtins.int",
        lambda: hvd.DistributedOptimizer(SGD(0.1)).register_local_var(1),
    )
    clipped = hvd.DistributedOptimizer(SGD(0.1, global_clipnorm=1.0))
    refused(
        "local layers do not work with global_clipnorm",
        lambda: clipped.register_local_var(keras.Variable(1.0)),
    )
    refused(
        "a local variable is a builtins.int",
        lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1]),
    )
    refused(
        "does not support fused=True.*\n  fix: the call without it",
        lambda: hvd.SyncBatchNormalization(fused=True),
    )
    refused(
        "synchronized=True belongs to tf.distribute",
        lambda: hvd.SyncBatchNormalization(synchronized=True),
    )
    refused("global variables belong to TensorFlow 1", lambda: hvd.broadcast_global_variables(0))
    refused(
        "legacy_opts=True: Keras 3 has no", lambda: hvd.load_model("model.keras", legacy_opts=True)
    )
    refused(
        "steps_per_epoch is unknown",
        lambda: hvd.callbacks.LearningRateWarmupCallback(0.1).on_train_begin(),
    )
    return ""


def refused(text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except UserError as error:
        assert re.search(text, str(error), re.DOTALL), str(error)
    else:
        raise AssertionError(f"not refused: {text}")


def ranks_with_another_number_of_batches_are_named() -> str:
    """Rank 0 has one more batch, while the other ranks call another collective. This is the last
    check, because JAX cannot continue after it."""
    x, y = (each[: BATCHES - (hvd.rank() > 0), hvd.rank()] for each in batches())
    net = model()
    net.compile(optimizer=hvd.DistributedOptimizer(SGD(0.05, name="sgd_here")), loss="mse")
    try:
        net.fit(x.reshape(-1, 5), y.reshape(-1, 1), batch_size=ROWS, shuffle=False, verbose=0)
        hvd.allreduce(np.zeros(1), name="after")
    except Exception as error:
        text = str(error)
        assert (
            "did not ask for it and cannot: rank 0 waits for allreduce 'gradients of sgd_here'"
            in text
        ), text
        assert "rank 1 waits for allreduce 'after'" in text, text
        return type(error).__name__
    raise AssertionError("no error")


ON_TORCH_ALONE = (fit_with_sums, fit_with_a_factor, passes_are_averaged, errors_say_what_to_do)
CHECKS = (
    fit_with_sgd,
    fit_with_adam,
    fit_in_16_bits_on_the_wire,
    accumulation_reduces_once_in_an_update,
    passes_are_added_up,
    fit_eagerly,
    a_loss_scale_leaves_out_a_step_on_all_ranks,
    mixed_precision_gets_a_loss_scale,
    metrics_are_averaged,
    warmup_changes_rate_and_momentum,
    schedules_have_the_rates_of_horovod,
    an_optimizer_is_made_from_its_config,
    numpy_scalars_are_averaged,
    moving_statistics_are_averaged_as_the_page_says,
    the_first_rank_begins,
    the_first_rank_begins_where_weights_come_with_data,
    a_saved_model_goes_on,
    calls_are_those_of_all_ranks,
    *ON_TORCH_ALONE * (BACKEND == "torch"),  # the same code on each backend
    *keras_layers_on_ranks.CHECKS,
    ranks_with_another_number_of_batches_are_named,
)


def failure_of(check: Callable[[], str]) -> str:
    try:
        print(f"rank {hvd.rank()}: {check.__name__} {check()}", flush=True)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    hvd.init()
    keras.config.set_floatx("float64")
    failures = {check.__name__: failure_of(check) for check in CHECKS}
    for rank, other in enumerate(hvd.allgather_object(failures)):
        for name, failure in other.items():
            failures[name] = failures[name] or (f"rank {rank}: {failure}" if failure else "")
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
