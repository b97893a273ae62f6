"""hvdtrain.horovod.tensorflow in loops of one's own, checked against TensorFlow in one process, as
one program for the ranks.

python tests/support/tensorflow_on_ranks.py OUT.json        writes {check: failure or ""}
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.horovod.keras
import hvdtrain.horovod.tensorflow as hvd
import hvdtrain.horovod.tensorflow.keras as hvd_keras
from hvdtrain.errors import UserError

ROWS = 6
STEPS = 4
NEAR = 1e-12
HOW: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "graph": tf.function}


def data(whole: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """(x, y) of each step: of this rank, or of all ranks."""
    made = np.random.default_rng(3)
    x = made.normal(size=(STEPS, hvd.size(), ROWS, 5))
    rule = made.normal(size=(5, 1))
    chosen = x if whole else x[:, hvd.rank() : hvd.rank() + 1]
    return [(rows.reshape(-1, 5), np.tanh(rows.reshape(-1, 5) @ rule)) for rows in chosen]


def variables(seed: int) -> list[tf.Variable]:
    made = np.random.default_rng(seed)
    return [tf.Variable(made.normal(size=shape) * 0.5) for shape in ((5, 7), (7,), (7, 1))]


def loss_of(weights: list[tf.Variable], x: Any, y: Any) -> Any:
    kernel, bias, out = weights
    return tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x @ kernel + bias) @ out) - y))


def trained(how: str, seed: int = 1, whole: bool = False, **options: Any) -> list[np.ndarray]:
    """The weights after a loop as Horovod's examples have it: the weights of rank 0 are sent after
    the first step."""
    weights = variables(seed)
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)

    @HOW[how]
    def step(x: Any, y: Any, is_first: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        tape = tape if whole else hvd.DistributedGradientTape(tape, **options)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        if is_first and not whole:
            hvd.broadcast_variables([*weights, *optimizer.variables], root_rank=0)
        return loss

    for number, (x, y) in enumerate(data(whole)):
        step(tf.constant(x), tf.constant(y), number == 0)
    return [weight.numpy() for weight in weights]


def a_loop_is_that_of_one_process() -> str:
    worst = 0.0
    for how in HOW:
        found = trained(how)
        expected = trained(how, whole=True)
        worst = max(
            worst,
            *(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True)),
        )
        assert worst < NEAR, (how, worst)
        for value in found:
            assert (hvd.allgather(tf.constant(value[None])).numpy() == value).all(), "ranks differ"
        later = trained(how, seed=1 + hvd.rank())
        assert all(
            (hvd.broadcast(tf.constant(value), 0).numpy() == value).all() for value in later
        ), "rank 0 did not begin"
    return f"{worst:.1e}"


def a_tape_has_options() -> str:
    sums = trained("graph", op=hvd.Sum)
    weight = tf.Variable([1.0, 2.0])
    unused = tf.Variable(1.0)
    with hvd.DistributedGradientTape(
        tf.GradientTape(persistent=True), compression=hvd.Compression.fp16
    ) as tape:
        loss = tf.reduce_sum(weight * (1.0 + hvd.rank()))
    found = tape.gradient(loss, {"weight": weight, "unused": unused})
    assert found["unused"] is None and found["weight"].dtype == tf.float32
    close(found["weight"], [(1 + hvd.size()) / 2] * 2)
    close(tape.gradient(loss, weight), [(1 + hvd.size()) / 2] * 2)
    assert np.isfinite(sums[0]).all()
    return ""


def slices_are_gathered() -> str:
    for compiled in HOW.values():
        for as_dense in (False, True):
            table = tf.Variable(np.zeros((4, 2)))

            @compiled
            def gradient(places: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(table, places))  # noqa: B023 (called in this turn)
                return hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(  # noqa: B023
                    loss,
                    table,  # noqa: B023
                )

            found = gradient(tf.constant([0, hvd.rank() + 1, 0][: 2 + hvd.rank()]))
            assert isinstance(found, tf.IndexedSlices) != as_dense
            expected = np.zeros((4, 2))
            for rank in range(hvd.size()):
                for place in [0, rank + 1, 0][: 2 + rank]:
                    expected[place] += 1 / hvd.size()
            close(tf.convert_to_tensor(found), expected)
    return ""


def an_embedding_fits_as_in_one_process() -> str:
    places = np.random.default_rng(1).integers(0, 9, size=(3, hvd.size(), 4, 2))
    found = []
    for whole in (False, True):
        keras.utils.set_random_seed(1)
        table = keras.layers.Embedding(9, 3, dtype="float64")
        net = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                table,
                keras.layers.Flatten(),
                keras.layers.Dense(1, dtype="float64"),
            ]
        )
        optimizer = keras.optimizers.Adam(0.05)
        net.compile(
            optimizer=optimizer if whole else hvd.DistributedOptimizer(optimizer), loss="mse"
        )
        rows = places if whole else places[:, hvd.rank() : hvd.rank() + 1]
        size = 4 * rows.shape[1]
        net.fit(
            rows.reshape(-1, 2),
            rows.sum(-1).reshape(-1, 1).astype(float),
            batch_size=size,
            epochs=2,
            shuffle=False,
            verbose=0,
        )
        found.append(net.get_weights())
    distance = max(float(np.abs(one - other).max()) for one, other in zip(*found, strict=True))
    assert distance < 1e-6, distance  # the loss is in float32
    return f"{distance:.1e}"


def calls_take_what_tensorflow_has() -> str:
    rank = hvd.rank()
    size = hvd.size()
    for dtype in (tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.float64):
        found = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.cast([1, 2], dtype))
        assert found.dtype == dtype
        close(tf.cast(found, tf.float64), [size, 2.0 * size])
    close(hvd.allreduce(tf.Variable(1.0 + rank), op=hvd.Max), float(size))
    close(hvd.broadcast(2.0 + rank, 0), 2.0)
    close(hvd.allgather([1.0 * rank]), np.arange(1.0 * size))
    close(tf.function(hvd.allgather)(tf.ones([rank + 1, 2])), np.ones((size * (size + 1) // 2, 2)))
    one, other = hvd.grouped_allreduce([tf.constant([1.0 * rank]), tf.constant([2])], op=hvd.Sum)
    close(one, [sum(range(size))])
    close(other, [2 * size])
    common = hvdtrain.horovod.allreduce(tf.constant([1.0 + rank]))
    assert isinstance(common, tf.Tensor)
    close(common, [(1 + size) / 2])
    assert hvd.broadcast_object_fn(root_rank=size - 1)({"rank": rank}) == {"rank": size - 1}
    assert hvd.allgather_object(rank) == list(range(size))
    return ""


def calls_are_those_of_torch() -> str:
    """Compares values, dtypes and shapes: integers with factors, booleans, 16 bits, scalars and
    empty tensors."""
    common = hvdtrain.horovod
    cases: dict[str, Callable[[Any, Any], Any]] = {
        "scaled": lambda module, x: module.allreduce(
            x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
        ),
        "average": lambda module, x: module.allreduce(x),
        "product": lambda module, x: module.allreduce(
            x, op=hvd.Product, compression=hvd.Compression.bf16
        ),
        "allgather": lambda module, x: module.allgather(x),
        "broadcast": lambda module, x: module.broadcast(x, hvd.size() - 1),
        "alltoall": lambda module, x: module.alltoall(
            x, splits=[len(x) - hvd.rank()] + [hvd.rank()] * (hvd.size() - 1)
        ),
        "reducescatter": lambda module, x: module.reducescatter(x, op=hvd.Sum),
    }
    for dtype, shape, (name, call) in itertools.product(
        (bool, "uint8", "int64", "float16", "float64"), ((3, 2), (), (0, 2)), cases.items()
    ):
        if (dtype is bool and name in ("scaled", "average")) or (
            not shape and name not in ("scaled", "average", "product", "broadcast")
        ):
            continue  # what torch does not have
        if name == "alltoall" and 0 in shape:
            continue
        array = np.array(np.arange(1.0, 1 + np.prod(shape)).reshape(shape) + 3 * hvd.rank()).astype(
            dtype
        )
        expected = call(common, array)
        for compiled in HOW.values():
            found = compiled(lambda x: call(hvd, x))(tf.constant(array))  # noqa: B023 (called in this turn)
            for one, other in (
                zip(found, expected, strict=True) if name == "alltoall" else [(found, expected)]
            ):
                assert np.array_equal(one.numpy(), np.asarray(other)), (dtype, shape, name)
                assert (
                    one.dtype == tf.as_dtype(np.asarray(other).dtype) and one.shape == other.shape
                ), (dtype, shape, name)
    return ""


def numpy_is_taken_and_tensors_come_back() -> str:
    rank = hvd.rank()
    size = hvd.size()
    for value in (np.mean([1.0, 2.0]) + rank, np.float32(rank), np.array([[1, 2]]) + rank):
        found = hvd.allreduce(value, op=hvd.Sum)
        assert isinstance(found, tf.Tensor) and found.dtype == tf.as_dtype(value.dtype)
        close(found, np.asarray(hvdtrain.horovod.allreduce(value, op=hvd.Sum)))
        close(tf.function(lambda: hvd.broadcast(value, size - 1))(), value - rank + size - 1)  # noqa: B023 (called in this turn)
    close(hvd.allgather(np.full(1, rank)), np.arange(size))
    close(hvd.reducescatter(np.ones(size), ignore_name_scope=True), [1.0])
    return ""


def casts_stay_in_the_library() -> str:
    x = tf.Variable([1.0, 2.0])
    for compiled in HOW.values():
        wire = compiled(lambda: hvd.Compression.fp16.compress(x)[0])()
        ctx = x.dtype
        assert isinstance(wire, tf.Tensor) and wire.dtype == tf.float16
        back = hvd.Compression.fp16.decompress(wire, ctx)
        assert back.dtype == tf.float32
        close(back, [1.0, 2.0])
    whole, ctx = hvd.Compression.bf16.compress(tf.constant([1]))
    assert whole.dtype == ctx == hvd.Compression.bf16.decompress(whole, ctx).dtype == tf.int32
    return ""


def slices_are_grouped_with_tensors() -> str:
    """Ranks have different numbers of slices: rank r has a row at place r, and all have one at
    place 3."""
    rank = hvd.rank()
    size = hvd.size()
    rows = np.zeros((4, 1))
    for other in range(size):
        rows[other % 3] += 1.0 + other
    rows[3] = 10.0 * size
    for compiled in HOW.values():
        for op, divisor in ((hvd.Average, size), (hvd.Sum, 1)):

            def call(op: int = op) -> Any:
                slices = tf.IndexedSlices(
                    tf.constant([[1.0 + rank], [10.0]]),
                    tf.constant([rank % 3, 3]),
                    tf.constant([4, 1]),
                )
                one, dense, other = hvd.grouped_allreduce(
                    [slices, tf.constant([1.0 + rank]), slices], op=op, name=f"group {op}"
                )
                return tf.convert_to_tensor(one), dense, tf.convert_to_tensor(other)

            one, dense, other = compiled(call)()
            close(one, rows / divisor)
            close(other, rows / divisor)
            close(dense, [size * (size + 1) / 2 / divisor])
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([4, 1]))
    refused("sparse_as_dense=True", lambda: hvd.grouped_allreduce([slices], op=hvd.Adasum))
    return ""


def a_tape_has_adasum() -> str:
    """Each gradient by itself, as hvdtrain.horovod.allreduce() combines it: not the concatenation
    of both."""
    made = np.random.default_rng(hvd.rank()).normal(size=(2, 3))
    one = tf.Variable(np.zeros(3))
    other = tf.Variable(np.zeros(3))
    for compiled in HOW.values():

        @compiled
        def gradients() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(one * made[0]) + tf.reduce_sum(other * made[1])
            return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(
                loss, [one, other], use_generic_names=True
            )

        for found, row in zip(gradients(), made, strict=True):
            close(found, hvdtrain.horovod.allreduce(row, op=hvd.Adasum))
    refused(
        "also supports Adasum",
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum),
    )
    return ""


def errors_of_a_function_name_the_call() -> str:
    try:
        tf.function(lambda: hvd.allreduce(tf.constant([True]), name="flags"))()
    except tf.errors.OpError as error:
        assert "no average of bool" in str(error) and "allreduce 'flags'" in str(error), str(error)
        assert "hvdtrain_allreduce_flags_runs_on_the_host" in str(error), str(error)
    else:
        raise AssertionError("no error")
    return ""


def a_state_is_that_of_the_last_commit() -> str:
    weight = tf.Variable(1.0 + hvd.rank())
    state = hvd.elastic.TensorFlowState([weight], batch=hvd.rank())
    state.sync()
    assert (float(weight), state.batch) == (1.0, 0)
    for value, batch in ((2.0, 5), (3.0, 6)):
        weight.assign(value)
        state.batch = batch
        if batch == 5:
            state.commit()
    state.restore()
    assert (float(weight), state.batch) == (2.0, 5)
    refused("global variables and sessions belong to TensorFlow 1", hvd.elastic.TensorFlowState)
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = hvd.elastic.TensorFlowKerasState(net, keras.optimizers.SGD(0.1), epoch=hvd.rank())
    state.sync()
    close(hvd.allreduce(net.weights[0], op=hvd.Max), net.weights[0].numpy())
    refused(
        "Model must be built first",
        lambda: hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)])),
    )
    return ""


def names_are_those_of_horovod() -> str:
    """Checks the names of 0.28.1, without imported modules and its internals."""
    here = """Adasum Average BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer Max Min
    PartialDistributedGradientTape ProcessSet Product Sum SyncBatchNormalization add_process_set allgather allgather_object allreduce
    alltoall broadcast broadcast_ broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables ccl_built
    check_extension cross_rank cross_size cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather
    grouped_allreduce grouped_reducescatter init is_homogeneous is_initialized join local_rank local_rank_op local_size local_size_op
    mpi_built mpi_enabled mpi_threads_supported nccl_built process_set_included_op rank rank_op reducescatter remove_process_set
    rocm_built shutdown size size_op start_timeline stop_timeline"""  # noqa: E501
    in_keras = """Adasum Average Compression DistributedOptimizer PartialDistributedOptimizer ProcessSet Sum add_process_set allgather
    allreduce broadcast broadcast_global_variables callbacks ccl_built cross_rank cross_size cuda_built ddl_built elastic
    global_process_set gloo_built gloo_enabled init is_initialized load_model local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built rank reducescatter remove_process_set rocm_built shutdown size start_timeline stop_timeline"""  # noqa: E501
    inside = (
        "compression.Compression functions.broadcast_variables mpi_ops.rank_op "
        "sync_batch_norm.SyncBatchNormalization"
    )
    assert [name for name in here.split() if not hasattr(hvd, name)] == []
    for module in (hvd_keras, hvdtrain.horovod.keras):
        assert [name for name in in_keras.split() if not hasattr(module, name)] == []
        callback = module.BroadcastGlobalVariablesCallback  # as courses write it
        assert callback is module.callbacks.BroadcastGlobalVariablesCallback
    for module, name in (name.split(".") for name in inside.split()):
        found = importlib.import_module(f"hvdtrain.horovod.tensorflow.{module}")
        assert getattr(found, name) is getattr(hvd, name) and getattr(hvd, module) is found
    for name, kind in (("callbacks", "BestModelCheckpoint"), ("elastic", "KerasState")):
        found = importlib.import_module(f"hvdtrain.horovod.tensorflow.keras.{name}")
        assert getattr(found, kind) is getattr(getattr(hvdtrain.horovod.keras, name), kind)
    for module in (hvd, hvd_keras):
        try:
            module.vars_to_refs  # noqa: B018
        except AttributeError as error:
            assert "docs/keras.md lists what it has" in str(error), str(error)
        else:
            raise AssertionError("it is there")
    return ""


def ranks_are_tensors() -> str:
    for how in HOW.values():
        found = how(
            lambda: [
                hvd.rank_op(),
                hvd.size_op(),
                hvd.local_rank_op(),
                hvd.local_size_op(),
                hvd.process_set_included_op(),
            ]
        )()
        assert [int(each) for each in found] == [
            hvd.rank(),
            hvd.size(),
            hvd.local_rank(),
            hvd.local_size(),
            1,
        ]
        assert all(each.dtype == tf.int32 and each.shape == () for each in found)
    return ""


def a_tape_leaves_local_layers_to_each_rank() -> str:
    """Gradients are (1 + rank) for each weight by hand; slices too."""
    rank = hvd.rank()
    size = hvd.size()
    local = keras.layers.Dense(1, use_bias=False, dtype="float64")
    local.build((None, 2))
    table = tf.Variable(np.ones((3, 2)))
    weight = tf.Variable(np.ones(2))
    x = tf.constant([[1.0 + rank] * 2], tf.float64)
    for compiled in HOW.values():
        for scale in (True, False):

            @compiled
            def gradients() -> Any:
                with hvd.PartialDistributedGradientTape(
                    tf.GradientTape(),
                    local_layers=local,
                    scale_local_gradients=scale,  # noqa: B023
                ) as tape:
                    loss = (
                        tf.reduce_sum(local(x))
                        + tf.reduce_sum(weight * x)
                        + tf.reduce_sum(tf.gather(table, [1]) * x)
                    )
                tape.register_local_source(table)
                (own, of_table), common = tape.get_local_and_global_gradients(
                    loss, [local.kernel, weight, table]
                )
                return own[1], of_table[1], common[0][1]

            own, of_table, common = gradients()
            divisor = size if scale else 1
            close(own, np.full((2, 1), (1.0 + rank) / divisor))
            close(
                tf.convert_to_tensor(of_table),
                np.array([[0.0] * 2, [(1.0 + rank) / divisor] * 2, [0.0] * 2]),
            )
            close(common, np.full(2, (1.0 + size) / 2))
    return ""


def errors_say_what_to_do() -> str:
    tape = tf.GradientTape()
    for call, text in (
        (lambda: hvd.DistributedGradientTape(tape, groups=2), "groups=2 has no effect"),
        (
            lambda: hvd.DistributedGradientTape(tape, op=hvd.Min),
            "gradients can only be averaged or summed here",
        ),
        (
            lambda: hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape)),
            "is already a DistributedGradientTape",
        ),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), use_locking=True),
            "use_locking=True has no effect",
        ),
        (lambda: hvd.BroadcastGlobalVariablesHook(0), "a SessionRunHook belongs to TensorFlow 1"),
        (lambda: hvd.broadcast_object(1, session=1), "a session belongs to TensorFlow 1"),
        (
            lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), op=hvd.Max),
            "IndexedSlices can only be summed or averaged",
        ),
        (
            lambda: tf.function(hvdtrain.horovod.allreduce, autograph=False)(tf.ones(2)),
            "import hvdtrain.horovod.tensorflow as hvd",
        ),
    ):
        refused(text, call)
    try:
        tf.function(hvd.allreduce, jit_compile=True)(tf.ones(2))
    except Exception as error:
        assert "hvdtrain_allreduce_runs_on_the_host_without_XLA" in str(error), (
            f"{type(error).__name__}: {error}"
        )
    else:
        raise AssertionError("XLA compiles it")
    return ""


def refused(text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except UserError as error:
        assert re.search(text, str(error), re.DOTALL), str(error)
    else:
        raise AssertionError(f"not refused: {text}")


def close(found: Any, expected: Any) -> None:
    array = found.numpy()
    assert array.shape == np.shape(expected) and np.abs(array - expected).max(initial=0.0) < NEAR, (
        array,
        expected,
    )


CHECKS = (
    a_loop_is_that_of_one_process,
    a_tape_has_options,
    slices_are_gathered,
    an_embedding_fits_as_in_one_process,
    calls_take_what_tensorflow_has,
    calls_are_those_of_torch,
    numpy_is_taken_and_tensors_come_back,
    casts_stay_in_the_library,
    slices_are_grouped_with_tensors,
    a_tape_has_adasum,
    errors_of_a_function_name_the_call,
    a_state_is_that_of_the_last_commit,
    names_are_those_of_horovod,
    ranks_are_tensors,
    a_tape_leaves_local_layers_to_each_rank,
    errors_say_what_to_do,
)


def failure_of(check: Callable[[], str]) -> str:
    try:
        print(f"rank {hvd.rank()}: {check.__name__} {check()}", flush=True)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    hvd.init()
    failures = {check.__name__: failure_of(check) for check in CHECKS}
    for rank, other in enumerate(hvd.allgather_object(failures)):
        for name, failure in other.items():
            failures[name] = failures[name] or (f"rank {rank}: {failure}" if failure else "")
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(failures))


if __name__ == "__main__":
    main()
