"""Data of any source as the model of a run takes them: its fields, and labels numbered as its
classes."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.config.schema import Config
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import LabelledImages, Source
from hvdtrain.errors import UserError, short
from hvdtrain.extras.trained_models.relabelled import relabelled, relabelled_rows
from hvdtrain.tasks.labels import classes_of
from hvdtrain.tasks.task import Task


def fit(source: Source, task: Task, config: Config) -> Source:
    """Returns the source with labels numbered as the model's classes. Raises UserError if the model
    cannot take its samples."""
    where = config.where("data.root")
    names = config.data.class_names
    has_one_input = task.transforms is None
    if task.class_label is None or not has_one_input or not isinstance(source, LabelledImages):
        return _with_fields_of(_with_classes_of(source, task, names, where), task, where)
    shape = task.fields["x"].shape
    label = task.fields[task.class_label]
    if source.shape != shape:
        what = (
            f"the images are {'x'.join(map(str, source.shape))}, the model takes "
            f"{'x'.join(map(str, shape))}"
        )
        raise UserError(
            what,
            where,
            f"data.size={shape[0]} and data.channels={shape[2]}, if data.name has these options; "
            "or other data",
        )
    if names and source.class_names:
        _refuse_unknown(source.class_names, names, where)
        return as_declared(
            source if list(source.class_names) == names else relabelled(source, names), task.fields
        )
    if classes_of(source, label.ignored) > label.values:
        raise UserError(
            f"the data have {source.classes} classes, the model {label.values}",
            where,
            "data with the same classes as the run",
        )
    return as_declared(source, task.fields)


def _with_classes_of(source: Source, task: Task, names: Sequence[str] | None, where: str) -> Source:
    """Returns the source with labels numbered as the run's classes. Raises UserError if its class
    names differ from the run's, or cannot be compared with them."""
    own = source.class_names
    if names and own:
        _refuse_unknown(own, names, where)
        return relabelled_rows(source, names)
    classes = 0 if task.class_label is None else task.fields[task.class_label].values
    if own and len(own) != classes:
        what = f"the data have {len(own):,} classes by name, the run {classes:,} without names"
        raise UserError(
            what, where, "data with all classes of the run (config.yaml has no very long lists)"
        )
    is_table = array_files_in(source) is not None and not isinstance(source, LabelledImages)
    if names and (is_table or source.takes_class_names) and task.class_label in source.fields:
        what = f"{task.class_label} has no names of classes, as the run has: {', '.join(names)}"
        what = short(what, 120)
        raise UserError(what, where, f"the names in {task.class_label}")
    return source


def _refuse_unknown(own: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raises UserError if the data have classes that the model does not know."""
    if unknown := [name for name in own if name not in names]:
        what = f"the model does not know {', '.join(unknown[:5])}{', ...' if unknown[5:] else ''}"
        raise UserError(what, where, f"data of its classes: {short(', '.join(names))}")


def _with_fields_of(source: Source, task: Task, where: str) -> Source:
    """Returns the source with integers of the task's type. Raises UserError if a field is missing
    or has another form."""
    for name, field in task.fields.items():
        found = source.fields.get(name)
        too_many = (
            found is not None
            and field.values
            and found.values > field.values
            and found.values - 1 != field.ignored
        )
        if found is None or not field.fits(found) or too_many:
            what = (
                f"the model takes {name} {field}, the data have "
                f"{f'it as {found}' if found else ', '.join(source.fields)}"
            )
            raise UserError(what, where, "data with the fields of the run")
    return as_declared(source, task.fields)
