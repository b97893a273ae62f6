"""A feature of a job: the words that turn it on, what it excludes, as data, and what the header
reports about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.comm.engines import Feature
from hvdtrain.config.exclusion import Exclusion, When, as_set, worded
from hvdtrain.config.schema import Config
from hvdtrain.core.extras import implementation
from hvdtrain.errors import UserError
from hvdtrain.recipe.recipe import Recipe

if TYPE_CHECKING:
    from hvdtrain.tasks.task import Task


class PlannedJob(NamedTuple):
    """What is known about a job before anything is built."""

    config: Config
    engine: str
    features: frozenset[Feature]  # features of the engine on every machine
    ranks: int

    def where(self, key: str) -> str:
        """Returns the key and where it was set."""
        return self.config.where(key)


Rule = Callable[[PlannedJob], Iterator[UserError]]  # a rule for conflicts that must be computed


class Conflict(NamedTuple):
    """A job that a feature does not support because of its engine, its number of ranks, or several
    keys; the texts are templates, as in an Exclusion."""

    when: Callable[[PlannedJob], bool]
    what: str
    fix: str
    key: str = ""  # the key whose location is in the message; empty: the feature's key

    @property
    def where(self) -> str:
        return self.key


class TaskConflict(NamedTuple):
    """A task with which a feature does not work, by its fields, masks and weights; judged when the
    task is known. The texts are templates, as in an Exclusion."""

    when: Callable[[Task], bool]
    what: str
    fix: str


Row = Exclusion | Conflict | Rule


def needs_engine(
    can: Feature,
    what: str,
    fix: str,
    key: str = "",
    when: Callable[[PlannedJob], bool] = lambda job: True,
) -> Conflict:
    """Returns a row of a feature that needs an engine with this capability."""
    return Conflict(lambda job: can not in job.features and when(job), what, fix, key)


@dataclass(frozen=True, kw_only=True, eq=False)  # rows may have lists, which have no hash
class JobFeature:
    """A feature that a configuration turns on.

    Its conflicts come in this order: values that have no effect without it, the rows of `first`,
    what it excludes, its other rows. docs/combinations.md shows what it excludes.
    """

    key: str  # turns it on; a message names the feature by this key and its value
    is_value: bool = False  # its key also belongs to another feature, or is a core key
    other_keys: tuple[str, ...] = ()  # its other keys, besides `key` and those of `without`
    on: When
    # words that turn it on in a large enough classification job, for the pair test; mine:NAME is a
    # user's object
    examples: tuple[str, ...] = ()
    chosen: Callable[[Config], str] | None = None  # how a message names it instead
    off: str | Callable[[Config], str] = ""  # the words that turn it off
    why: str = ""  # why it excludes these, in a few words
    what: str = "{chosen} does not support {set}"
    fix: str = "leave {key} out, or {off}"
    without: tuple[Exclusion, ...] = ()  # values that have no effect while the feature is off
    first: tuple[Row, ...] = ()
    excludes: tuple[Exclusion, ...] = ()
    rules: tuple[Row, ...] = ()
    excludes_tasks: tuple[TaskConflict, ...] = ()
    updates_whole_weights: bool = True  # all ranks apply one update to full weights
    has_common_steps: bool = True  # all ranks take each step together
    reader: str = ""  # what the header calls a rank that reads samples; empty: a rank
    is_extra: bool = False  # an extra implements its key (Extra.implements), which may be missing
    extra_values: tuple[str, ...] = ()  # or these of its values, such as shard.stage=3
    own_loop: str = ""  # what a custom loop uses instead of its key
    keys_of_custom_loops: tuple[str, ...] = ()  # its keys that a custom loop supports
    # "module:class" of framework=torch: how the model is distributed; or a function that returns
    # the class for a configuration
    arrangement: str | Callable[[Config], str] = ""
    # "module:class" of framework=torch: how ranks of mesh.tensor divide layers
    layer_division: str | Callable[[Config], str] = ""
    # "module:function" of framework=torch that divides samples in an arrangement whose ranks have
    # parts of the layers (DividedModel), and returns a SampleDivision
    sample_division: str = ""
    # "module:function" of framework=torch that creates its StepAddition, as assemble.py calls it
    step_addition: str | Callable[[Config], str] = ""
    gauge: str = ""  # "module:function" that creates its measurement, as telemetry.py calls it
    event_fields: tuple[str, ...] = ()  # it adds to the events step and epoch
    lines_of_ranks: Callable[[Config, Sequence[str]], Sequence[str]] = lambda config, hosts: ()
    words_of_counts: Callable[[Config], str] = lambda config: ""
    words_of_reading: Callable[[Config, Recipe, int], str] = lambda config, recipe, readers: ""
    lines_of_recipe: Callable[[Config, Recipe, int], Sequence[str]] = (
        lambda config, recipe, samples: ()
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The configuration keys that belong to it: its own key and its options."""
        own = () if self.is_value else (self.key,)
        read = (row.key for row in self.without)
        return tuple(dict.fromkeys((*own, *read, *self.other_keys)))

    @property
    def is_installed(self) -> bool:
        """Whether this copy of hvdtrain has its code, at least for some values of its key."""
        return not self.is_extra or implementation(self.key) is not None

    def is_installed_for(self, config: Config) -> bool:
        """Whether this copy of hvdtrain has the code that a job with this feature needs."""
        value = as_set(config, self.key)
        return self.is_installed and (
            value not in self.extra_values or implementation(value) is not None
        )

    def ranks_lines(self, config: Config, hosts: Sequence[str]) -> Sequence[str]:
        """Returns lines of the header below the line of the ranks; hosts: the host of each rank."""
        return self.lines_of_ranks(config, hosts) if self.on(config) else ()

    def arrangement_in(self, config: Config) -> str:
        """Returns the "module:class" of how it distributes the model; empty if it does not."""
        return self._class(self.arrangement, config)

    def layer_division_in(self, config: Config) -> str:
        """Returns the "module:class" of how it divides layers; empty if it does not."""
        return self._class(self.layer_division, config)

    def step_addition_in(self, config: Config) -> str:
        """Returns the "module:function" of what it adds to a step; empty if it adds nothing."""
        return self._class(self.step_addition, config)

    def _class(self, name: str | Callable[[Config], str], config: Config) -> str:
        if not self.on(config):
            return ""
        return name if isinstance(name, str) else name(config)

    def count_words(self, config: Config) -> str:
        """Returns what the header shows after the numbers of samples."""
        return self.words_of_counts(config) if self.on(config) else ""

    def reading_words(self, config: Config, recipe: Recipe, readers: int) -> str:
        """Returns what the header shows about how samples are drawn and batched."""
        return self.words_of_reading(config, recipe, readers) if self.on(config) else ""

    def recipe_lines(self, config: Config, recipe: Recipe, samples: int) -> Sequence[str]:
        """Returns lines of the header below the line of the recipe; samples: of the training
        set."""
        return self.lines_of_recipe(config, recipe, samples) if self.on(config) else ()

    def conflicts(self, job: PlannedJob) -> Iterator[UserError]:
        """Yields every conflict of this feature in a job, in order."""
        is_on = self.on(job.config)
        for row in self.without:
            if row.holds(job.config, not is_on):
                yield self.error(row, job)
        if is_on:
            for one in (*self.first, *self.excludes, *self.rules):
                yield from self._errors(one, job)

    def task_conflicts(self, config: Config, task: Task) -> Iterator[UserError]:
        """Yields every conflict of this feature with the job's task."""
        if self.on(config):
            for row in self.excludes_tasks:
                if row.when(task):
                    yield worded(self.key, self.key, row.what, row.fix, config, {})

    def unread_keys(self, config: Config) -> list[str]:
        """Returns keys that are set but have no effect, because the feature is off."""
        is_off = not self.on(config)
        return [row.key for row in self.without if row.holds(config, is_off)]

    def name(self, config: Config) -> str:
        """Returns how a message names the feature: shard.stage=1."""
        return self.chosen(config) if self.chosen else as_set(config, self.key)

    def missing(self, job: PlannedJob) -> Iterator[UserError]:
        """Yields an error if the job needs an extra that is not installed."""
        if self.on(job.config) and not self.is_installed_for(job.config):
            yield self.not_installed(job.config)

    def not_installed(self, config: Config) -> UserError:
        """Returns the error for a job that needs an extra which is not installed."""
        off = self.off if isinstance(self.off, str) else self.off(config)
        return UserError(
            f"this copy of hvdtrain has no extra that does {self.name(config)}",
            config.where(self.key),
            f"{off}; `hvdtrain extras` lists the installed extras",
        )

    def _errors(self, row: Row, job: PlannedJob) -> Iterator[UserError]:
        if not isinstance(row, Exclusion | Conflict):
            yield from row(job)
        elif row.holds(job.config) if isinstance(row, Exclusion) else row.when(job):
            yield self.error(row, job)

    def error(self, row: Exclusion | Conflict, job: PlannedJob) -> UserError:
        """Returns the error for a job that a row rejects."""
        key = row.key or self.key
        texts = {
            "chosen": self.name(job.config),
            "off": self.off if isinstance(self.off, str) else self.off(job.config),
            "mesh": job.config.parallel.summary(),
            "engine": job.engine,
            "ranks": job.ranks,
        }
        fix = row.fix or self.fix
        if any(row is each for each in self.without) and self._needs_extra(fix):
            fix = "leave {key} out"
        return worded(key, row.where or key, row.what or self.what, fix, job.config, texts)

    def _needs_extra(self, fix: str) -> bool:
        """Whether what a fix proposes, to turn the feature on, needs an extra that is missing."""
        values = (value for value in self.extra_values if value in fix)
        return not self.is_installed or any(implementation(value) is None for value in values)
