"""One small network in each library of JAX, for images (3, 3, 1) of three classes, with dropout;
and models that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HIDDEN = 7
DROP = 0.25
Arrays = Mapping[str, Any]  # by the names of the parameters in a job


class LinenNet(nn.Module):
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.tanh(nn.Dense(HIDDEN, name="first")(x.reshape(len(x), -1)))
        x = nn.Dropout(DROP)(x, deterministic=not train)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class NnxNet(nnx.Module):
    def __init__(self, shape: tuple[int, ...], classes: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [
                nnx.Linear(int(np.prod(shape)), HIDDEN, rngs=rngs),
                nnx.Linear(HIDDEN, classes, rngs=rngs),
            ]
        )
        self.drop = nnx.Dropout(DROP, rngs=rngs)
        self.table = nnx.Variable(jnp.ones(HIDDEN))

    def __call__(self, x: Any) -> Any:
        return self.layers[1](
            self.drop(jnp.tanh(self.layers[0](x.reshape(len(x), -1)))) * self.table[...]
        )


class EquinoxNet(eqx.Module):
    layers: list[eqx.nn.Linear]
    drop: eqx.nn.Dropout

    def __init__(self, shape: tuple[int, ...], classes: int, key: Any) -> None:
        one, two = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(int(np.prod(shape)), HIDDEN, key=one),
            eqx.nn.Linear(HIDDEN, classes, key=two),
        ]
        self.drop = eqx.nn.Dropout(DROP)

    def __call__(self, x: Any, key: Any = None) -> Any:
        return self.layers[1](self.drop(jnp.tanh(self.layers[0](x.ravel())), key=key))


def haiku_net(classes: int) -> hk.Transformed:
    def forward(x: Any, is_training: bool) -> Any:
        drop = {"dropout_rate": DROP, "rng": hk.next_rng_key()} if is_training else {}
        return hk.nets.MLP([HIDDEN, classes], activation=jnp.tanh)(hk.Flatten()(x), **drop)

    return hk.transform(forward)


class Reference(Protocol):
    """What the library itself computes."""

    names: tuple[str, ...]  # of the parameters in a job

    def outputs(self, arrays: Arrays, x: Any, key: Any | None) -> Any:
        """key: of a pass in training."""

    def of_pytree(self, pytree: Any, x: Any) -> Any:
        """In evaluation, of run.pytree."""


class OfLinen:
    names = ("first.kernel", "first.bias", "Dense_0.kernel", "Dense_0.bias")

    def outputs(self, arrays: Arrays, x: Any, key: Any | None) -> Any:
        params = {
            layer: {part: arrays[f"{layer}.{part}"] for part in ("kernel", "bias")}
            for layer in ("first", "Dense_0")
        }
        return LinenNet(3).apply(
            {"params": params},
            x,
            train=key is not None,
            rngs={} if key is None else {"dropout": key},
        )

    def of_pytree(self, pytree: Any, x: Any) -> Any:
        return LinenNet(3).apply({"params": pytree}, x)


class OfNnx:
    names = ("layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias")

    def outputs(self, arrays: Arrays, x: Any, key: Any | None) -> Any:
        net = NnxNet((3, 3, 1), 3, nnx.Rngs(0))
        for number, layer in enumerate(net.layers):
            layer.kernel, layer.bias = (
                nnx.Param(arrays[f"layers.{number}.{part}"]) for part in ("kernel", "bias")
            )
        rngs = None if key is None else nnx.Rngs(jax.random.fold_in(key, 0))
        hidden = net.drop(
            jnp.tanh(net.layers[0](x.reshape(len(x), -1))), deterministic=key is None, rngs=rngs
        )
        return net.layers[1](hidden)

    def of_pytree(self, pytree: Any, x: Any) -> Any:
        return pytree(x)


class OfEquinox:
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")

    def outputs(self, arrays: Arrays, x: Any, key: Any | None) -> Any:
        net = eqx.tree_at(
            lambda net: [
                getattr(layer, part) for layer in net.layers for part in ("weight", "bias")
            ],
            EquinoxNet((3, 3, 1), 3, jax.random.key(0)),
            [arrays[name] for name in self.names],
        )
        if key is None:
            return jax.vmap(eqx.nn.inference_mode(net))(x)
        return jnp.stack([net(one, jax.random.fold_in(key, i)) for i, one in enumerate(x)])

    def of_pytree(self, pytree: Any, x: Any) -> Any:
        return jax.vmap(eqx.nn.inference_mode(pytree))(x)


class OfHaiku:
    names = ("mlp.linear_0.w", "mlp.linear_0.b", "mlp.linear_1.w", "mlp.linear_1.b")

    def outputs(self, arrays: Arrays, x: Any, key: Any | None) -> Any:
        params = {
            f"mlp/~/linear_{number}": {part: arrays[f"mlp.linear_{number}.{part}"] for part in "wb"}
            for number in (0, 1)
        }
        return haiku_net(3).apply(params, key, x, is_training=key is not None)

    def of_pytree(self, pytree: Any, x: Any) -> Any:
        return haiku_net(3).apply(pytree, None, x, is_training=False)


class Case(NamedTuple):
    name: str  # of its maker here
    reference: Reference


CASES = {
    "linen": Case("LinenNet", OfLinen()),
    "nnx": Case("NnxNet", OfNnx()),
    "equinox": Case("EquinoxNet", OfEquinox()),
    "haiku": Case("haiku_net", OfHaiku()),
}


def made(library: str) -> Any:
    """The module as an object, for images (3, 3, 1)."""
    makers = {
        "linen": lambda: LinenNet(3),
        "nnx": lambda: NnxNet((3, 3, 1), 3, nnx.Rngs(4)),
        "equinox": lambda: EquinoxNet((3, 3, 1), 3, jax.random.key(4)),
        "haiku": lambda: haiku_net(3),
    }
    return makers[library]()


def linen_bound() -> Any:
    net = LinenNet(3)
    return net.bind(net.init(jax.random.key(7), jnp.zeros((1, 3, 3, 1))))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x.reshape(len(x), -1)))


def linen_normed_bound() -> Any:
    net = LinenNormed()
    return net.bind(net.init(jax.random.key(0), jnp.zeros((1, 3, 3, 1))))


class NnxNormed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(9, rngs=rngs)
        self.out = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.norm(x.reshape(len(x), -1)))


class SowingLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = x.reshape(len(x), -1)
        self.sow("intermediates", "penalty", jnp.mean(hidden**2))
        return nn.Dense(3)(hidden)


class SowingNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(9, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = x.reshape(len(x), -1)
        self.sow(nnx.Intermediate, "penalty", jnp.mean(hidden**2))
        return self.out(hidden)


class EquinoxNormed(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.norm = eqx.nn.BatchNorm(9, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(9, 3, key=key)

    def __call__(self, x: Any, state: Any) -> Any:
        hidden, state = self.norm(x.ravel(), state)
        return self.out(hidden), state


def equinox_with_state(key: Any) -> Any:
    return eqx.nn.make_with_state(EquinoxNormed)(key)


def haiku_normed(with_state: bool = True) -> Any:
    def forward(x: Any, is_training: bool) -> Any:
        return hk.Linear(3)(hk.BatchNorm(True, True, 0.9)(hk.Flatten()(x), is_training))

    return (hk.transform_with_state if with_state else hk.transform)(forward)


def narrow() -> Any:
    return LinenNet(2)


def in_float32() -> Any:
    return LinenNet(3, jnp.float32)


def of_batches(key: Any) -> Any:
    return eqx.nn.MLP(9, 3, 4, 1, key=key)


class NoParameters(nn.Module):
    def __call__(self, x: Any) -> Any:
        return x.reshape(len(x), -1)[:, :3]
