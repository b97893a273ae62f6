"""Layers that know of the other ranks, and layers that ranks train alone: hvdtrain.horovod.keras
checked in float64 against Keras in one process and against NumPy. keras_on_ranks.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdtrain.horovod.keras as hvd
from hvdtrain.frameworks.keras.build import load_keras

NEAR = 1e-12
ON_TORCH = keras.backend.backend() == "torch"
STEPS = 3
Norm = Callable[..., Any]


def in_float64() -> None:
    load_keras("a test", np.dtype("float64"))


def rows_of(rank: int) -> int:
    return 3 + 2 * rank


def shares() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """(x, y) by step and rank: uneven shares, far from 0."""
    made = np.random.default_rng(5)
    sizes = [rows_of(rank) for rank in range(hvd.size())]
    return [
        [(made.normal(2, 3, size=(n, 5)), made.normal(size=(n, 1))) for n in sizes]
        for _ in range(STEPS)
    ]


def with_norms(norm: Norm) -> Any:
    """Two norms: of channels in the last axis, and of channels before places."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inner = [
        layers.Dense(6),
        layers.Reshape((2, 3)),
        norm(axis=1, momentum=0.7),
        layers.Flatten(),
        layers.Activation("tanh"),
    ]
    return keras.Sequential(
        [keras.Input((5,)), *inner, norm(momentum=0.8, center=False), layers.Dense(1)]
    )


def fitted(net: Any, optimizer: Any, *, whole: bool) -> list[np.ndarray]:
    """Returns all weights after an epoch with the sum of squares as loss: for any shares, the sum
    over ranks equals the whole batch's."""
    steps = [
        [each] if not whole else of_all for of_all in shares() for each in [of_all[hvd.rank()]]
    ]
    joined = [[np.concatenate(parts) for parts in zip(*step, strict=True)] for step in steps]
    x, y = (np.concatenate(parts) for parts in zip(*joined, strict=True))
    net.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(reduction="sum"))
    net.fit(x, y, batch_size=len(joined[0][0]), shuffle=False, verbose=0)
    return [np.array(each) for each in net.get_weights()]


def norms_are_those_of_the_whole_batch() -> str:
    in_float64()
    found = fitted(
        with_norms(hvd.SyncBatchNormalization),
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum),
        whole=False,
    )
    expected = fitted(
        with_norms(keras.layers.BatchNormalization), keras.optimizers.SGD(0.01), whole=True
    )
    if ON_TORCH:
        own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum)
        assert (
            far(fitted(with_norms(keras.layers.BatchNormalization), own, whole=False), expected)
            > 1e-3
        ), "norms of one rank are the same"
    distance = far(found, expected)
    assert distance < NEAR, distance
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(hvd.SyncBatchNormalization(momentum=0.7))
    )
    assert isinstance(again, hvd.SyncBatchNormalization) and again.momentum == 0.7
    return f"{distance:.1e}"


def norms_leave_out_what_is_masked_and_take_ranks_without_rows() -> str:
    in_float64()
    made = np.random.default_rng(7)
    x = made.normal(size=(hvd.size(), 4, 6, 3))
    mask = made.random((hvd.size(), 4, 6)) < 0.6
    rows = [4] * (hvd.size() - 1) + [0]
    found = hvd.SyncBatchNormalization(name="masked")
    expected = keras.layers.BatchNormalization()
    here = slice(None, rows[hvd.rank()])
    out = found(
        x[hvd.rank(), here], mask=keras.ops.convert_to_tensor(mask[hvd.rank(), here]), training=True
    )
    whole = [
        np.concatenate([part[:n] for part, n in zip(parts, rows, strict=True)])
        for parts in (x, mask)
    ]
    of_all = expected(whole[0], mask=keras.ops.convert_to_tensor(whole[1]), training=True)
    if rows[hvd.rank()]:
        start = sum(rows[: hvd.rank()])
        assert far([array(out)], [array(of_all)[start : start + 4]]) < NEAR
    distance = far(found.get_weights(), expected.get_weights())
    assert distance < NEAR, distance
    return f"{distance:.1e}"


def a_local_layer_is_that_of_each_rank() -> str:
    """Compares with NumPy: the first layer uses averaged gradients, the second the rank's own,
    divided by the number of ranks if they are scaled."""
    in_float64()
    worst = 0.0
    of_torch = ({"scale_local_gradients": False}, 1), ({}, 1)  # the same code on each backend
    for options, passes in (({}, 2), *of_torch * ON_TORCH):
        keras.utils.set_random_seed(1)
        net = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        first = net.get_weights()
        optimizer = keras.optimizers.SGD(
            0.05, gradient_accumulation_steps=passes if passes > 1 else None
        )
        net.compile(
            hvd.PartialDistributedOptimizer(optimizer, local_layers=net.layers[1:], **options),
            loss="mse",
        )
        steps = [[(x[:3], y[:3]) for x, y in step] for step in (shares() + shares())[:4]]
        mine = [step[hvd.rank()] for step in steps]
        x, y = (np.concatenate(parts) for parts in zip(*mine, strict=True))
        net.fit(x, y, batch_size=3, shuffle=False, verbose=0)
        scale = hvd.size() if options.get("scale_local_gradients", True) else 1
        expected = by_numpy(first, steps, passes, scale)[hvd.rank()]
        worst = max(worst, far(net.get_weights(), expected))
        assert worst < NEAR, (options, passes, worst)
        others = hvd.allgather_object([each.tolist() for each in net.get_weights()])
        assert others[0][:2] == others[-1][:2] and others[0][2:] != others[-1][2:]
    return f"{worst:.1e}"


def by_numpy(
    first: list[np.ndarray],
    steps: list[list[tuple[np.ndarray, np.ndarray]]],
    passes: int,
    scale: int,
) -> list[list[np.ndarray]]:
    """The weights of each rank."""
    ranks = [[array.copy() for array in first] for _ in steps[0]]
    for start in range(0, len(steps), passes):
        of_ranks = [
            [
                sum(parts) / passes
                for parts in zip(
                    *(gradients(weights, *step[rank]) for step in steps[start : start + passes]),
                    strict=True,
                )
            ]
            for rank, weights in enumerate(ranks)
        ]
        mean = [sum(parts) / len(ranks) for parts in zip(*of_ranks, strict=True)]
        for weights, own in zip(ranks, of_ranks, strict=True):
            for place in range(4):
                weights[place] -= 0.05 * (mean[place] if place < 2 else own[place] / scale)
    return ranks


def gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Returns the gradients of the mean squared error of a tanh layer and a linear layer."""
    kernel, bias, out, shift = weights
    hidden = np.tanh(x @ kernel + bias)
    error = 2 * (hidden @ out + shift - y) / len(x)
    inner = (error @ out.T) * (1 - hidden**2)
    return [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]


def local_variables_are_not_broadcast() -> str:
    keras.utils.set_random_seed(10 + hvd.rank())
    net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    own = net.get_weights()
    of_root = hvd.broadcast_object(own, 0)
    local = net.layers[1].trainable_variables
    net.compile(
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.0), local_layers=net.layers[1]),
        loss="mse",
    )
    x, y = shares()[0][0]
    net.fit(
        x,
        y,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)],
    )
    assert far(net.get_weights(), [*of_root[:2], *own[2:]]) == 0.0 and (
        hvd.rank() == 0 or far(own, of_root) > 0.01
    )
    return ""


def far(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(
        float(np.abs(one - other).max(initial=0.0))
        for one, other in zip(found, expected, strict=True)
    )


def array(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


CHECKS = (
    norms_are_those_of_the_whole_batch,
    norms_leave_out_what_is_masked_and_take_ranks_without_rows,
    a_local_layer_is_that_of_each_rank,
    *(local_variables_are_not_broadcast,) * ON_TORCH,  # the same code on each backend
)
