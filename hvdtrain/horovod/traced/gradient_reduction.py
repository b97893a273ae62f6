"""Combines the gradients of Keras optimizers and TensorFlow tapes over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.horovod.basics import ProcessSet
from hvdtrain.horovod.call import Adasum, Average, Compressor, Sum
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.libraries import as_written, tensorflow
from hvdtrain.horovod.traced.collectives import allgather, allreduce


@dataclass(frozen=True)
class GradientReduction:
    """A reduction over the ranks of a process set. predivide: divides before the sum, and the sum
    is divided by size / predivide.

    Gradients of local variables are not reduced. scales_local: divides them by size, as Horovod
    does, so that they are this rank's part of the average, for which learning rates are chosen.
    """

    name: str
    where: str  # in error messages
    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    scales_local: bool = True
    has_adasum: bool = False  # as in Horovod's tapes, but not in its Keras optimizers
    local: set[int] = field(default_factory=set)  # identities of variables

    def __post_init__(self) -> None:
        """Raises BadCall for meaningless arguments."""
        ops = (Average, Sum, Adasum) if self.has_adasum else (Average, Sum)
        if self.op not in ops:
            fix = "op=hvd.Average or hvd.Sum; hvd.DistributedGradientTape() also supports Adasum"
            raise BadCall(
                f"op={self.op!r} is not supported: gradients can only be averaged or summed here",
                self.where,
                fix,
            )
        if self.predivide != 1.0 and self.op != Average:
            raise BadCall(
                "gradient_predivide_factor not supported with op != Average",
                self.where,
                "op=hvd.Average",
            )

    @as_written
    def reduce(self, grads: Sequence[Any], variables: Sequence[int] = ()) -> list[Any]:
        """Reduces the gradients over all ranks, if there are any: dense ones as one request,
        TensorFlow slices by gathers.

        variables: their identities, if some are local.
        """
        if JOB.engine.size == 1 or not self.process_set.included():
            return list(grads)
        if not self.local:
            return self._reduce_all(grads)
        found = [
            self._scaled(grad) if variable in self.local else None
            for grad, variable in zip(grads, variables, strict=True)
        ]
        common = [
            None if variable in self.local else grad
            for grad, variable in zip(grads, variables, strict=True)
        ]
        return [
            one if other is None else other
            for one, other in zip(found, self._reduce_all(common), strict=True)
        ]

    def _scaled(self, grad: Any) -> Any:
        """Returns the gradient of a local variable."""
        size = self.process_set.size() or 1
        if grad is None or not self.scales_local:
            return grad
        return (
            tensorflow().IndexedSlices(grad.values / size, grad.indices, grad.dense_shape)
            if _is_sparse(grad)
            else grad / size
        )

    @as_written
    def _reduce_all(self, grads: Sequence[Any]) -> list[Any]:
        reduced = list(grads)
        if self.sparse_as_dense:
            reduced = [
                tensorflow().convert_to_tensor(grad) if _is_sparse(grad) else grad
                for grad in reduced
            ]
        sparse = [place for place, grad in enumerate(reduced) if _is_sparse(grad)]
        dense = [
            place for place, grad in enumerate(reduced) if grad is not None and place not in sparse
        ]
        if dense:
            for place, grad in zip(
                dense, self._reduce_dense([reduced[place] for place in dense]), strict=True
            ):
                reduced[place] = grad
        if sparse:
            check_slices(self.op, 1.0, 1.0, self.where)
            slices = reduce_slices(
                [reduced[place] for place in sparse],
                self.op,
                name=f"{self.name}.slices",
                process_set=self.process_set,
            )
            for place, grad in zip(sparse, slices, strict=True):
                reduced[place] = grad
        return reduced

    def _reduce_dense(self, grads: list[Any]) -> list[Any]:
        return allreduce(
            grads,
            self.op,
            name=self.name,
            compression=self.compression,
            prescale=1.0 / self.predivide,
            postscale=self.predivide,
            process_set=self.process_set,
        )


@as_written
def reduce_slices(
    slices: Sequence[Any], op: int, *, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Sums or averages tf.IndexedSlices: concatenates the slices of all ranks, like the slices of
    one batch."""
    names = (None, None) if name is None else (f"{name}.values", f"{name}.indices")
    values = allgather([each.values for each in slices], name=names[0], process_set=process_set)
    indices = allgather([each.indices for each in slices], name=names[1], process_set=process_set)
    if op == Average:
        values = [each / (process_set.size() or 1) for each in values]
    found = zip(values, indices, slices, strict=True)
    return [
        tensorflow().IndexedSlices(value, index, each.dense_shape) for value, index, each in found
    ]


def check_slices(op: int, prescale: float, postscale: float, where: str) -> None:
    """Raises BadCall for a reduction that slices do not support, as in Horovod."""
    if op not in (Average, Sum) or not prescale == postscale == 1:
        fix = "tf.convert_to_tensor(slices), or sparse_as_dense=True"
        raise BadCall(
            "tf.IndexedSlices can only be summed or averaged, without factors", where, fix
        )


def refuse_placements(where: str, **arguments: Any) -> None:
    """Raises BadCall for Horovod arguments that select where or in which groups tensors are
    reduced: they would have no effect here."""
    for name, value in arguments.items():
        if value:
            what = (
                f"{name}={value!r:.60} has no effect: tensors are reduced in host memory, all "
                "gradients as one group"
            )
            raise BadCall(what, where, f"the call without {name}")


def _is_sparse(grad: Any) -> bool:
    tf = tensorflow()
    return tf is not None and isinstance(grad, tf.IndexedSlices)
