"""The arguments of evaluate, predict and sample, and the configuration that they take from the
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.config.read import Assignment, read_argument, read_resumed
from hvdtrain.config.sections.section import Given, is_object
from hvdtrain.core.extras import tables
from hvdtrain.errors import UserError, nearest, short
from hvdtrain.features.optim import EMA

OF_A_FILE = Given("<object of hvdtrain:file>", lambda: None, {})  # predict --data FILE
# predict --data FILE.nc, with the run's data.fields
OF_STORED_ARRAYS = Given("<object of hvdtrain:arrays>", lambda: None, {})
OF_ROWS = ("data.fields.", "data.delimiter")  # which columns of a file are inputs
# Keys of the run that define its model and its data. Other keys define the training, which no
# longer matters.
_OF_ARRAYS = ("data.fields.", "data.dtypes.", "data.gaps", "data.shift")
_OF_THE_RUN = (
    "framework",
    "seed",
    "data.",
    "task.",
    "model.",
    "norm.",
    "speed.",
    "batch.evaluate",
    "evaluate.views",
    EMA.key,
)
_OF_THE_COMMAND = (  # keys that are accepted as key=value
    "data.",
    "task.",
    "model.",
    "speed.",
    "comm.",
    "guard.",
    "shard.stage",
    "shard.offload",
    "batch.evaluate",
    "evaluate.views",
    EMA.key,
)


class Arguments(NamedTuple):
    """A command line: RUN, --name VALUE for each option, and key=value."""

    run: str
    options: Mapping[str, Any]
    overrides: list[str]

    def of_job(self) -> list[str]:
        """Returns the arguments of the configuration. batch.size is one sample per rank, so that
        any number of ranks works."""
        return [f"resume={self.run}", *self.overrides, "batch.per_rank=1"]


def parse(
    command: str,
    usage: str,
    arguments: Sequence[str],
    options: Mapping[str, str | None],
    flags: Sequence[str] = (),
) -> Arguments:
    """Parses a command line. options: {"--name": its default}; flags have no value. Raises
    UserError if the command line does not match `usage`."""
    parser = CommandParser(command, usage.partition("\n")[0])
    for name, default in options.items():
        parser.add_argument(name, default=default)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    parsed, rest = parser.parse_known_args(list(arguments))
    words = [argument for argument in rest if "=" not in argument]
    if unknown := [word for word in words if word.startswith("-")]:
        parser.error(
            f"unknown argument '{short(unknown[0])}': {nearest(unknown[0], [*options, *flags])}"
        )
    if len(words) != 1:
        taken = vars(parsed).get("json") or "-"
        missing = (
            "RUN is missing"
            if taken == "-"
            else f"RUN is missing: {short(taken)} is the FILE of --json"
        )
        parser.error(
            f"one RUN is needed, not {len(words)}: {short(' '.join(words))}" if words else missing
        )
    overrides = [argument for argument in rest if "=" in argument]
    for argument in overrides:
        given = read_argument(argument)
        if (
            given.key == EMA.key and given.value is not None
        ):  # nothing is averaged here, so the decay does not matter
            what = (
                f"{command} does not accept {short(argument)}: it uses the weight averages of the "
                "run"
            )
            raise UserError(
                what,
                f"command line of {command}",
                f"{EMA.off} for the weights without averaging, or leave it out",
            )
        if not given.key.startswith(_OF_THE_COMMAND):
            what = f"{command} does not accept {short(argument)}, because it does not train"
            raise UserError(
                what,
                f"command line of {command}",
                f"keys of {', '.join(key.rstrip('.') for key in _OF_THE_COMMAND)}",
            )
    return Arguments(words[0], vars(parsed), overrides)


def read_former_run(assigned: Sequence[Assignment]) -> list[Assignment]:
    """Reads the run's configuration of model and data. Raises UserError if it cannot be read.

    If the command names other data, only the names of the run's classes and the form of its images
    are kept. shard.stage=3 is kept, because the model may not fit on one rank.
    """
    given = {assignment.key: assignment.value for assignment in assigned}
    former = read_resumed(assigned)
    name_of_run = next((one.value for one in former if one.key == "data.name"), None)
    # the same name only says that the run's own code is trusted
    names_other_data = "data.root" in given or given.get("data.name", name_of_run) != name_of_run
    # this machine may have fewer devices
    dropped = ("speed.devices", *["data.val_share", "data.share"] * names_other_data)
    kept = [a for a in former if a.key.startswith(_OF_THE_RUN) and not a.key.startswith(dropped)]
    kept += [a for a in former if a.key == "shard.stage" and a.value == 3]
    recorded = {assignment.key: assignment.value for assignment in kept}
    if "data.name" in given and given["data.name"] != recorded.get(
        "data.name"
    ):  # its options belong to another data set
        remain: tuple[str, ...] = ("data.class_names",)
        name = given["data.name"]
        of_tables = tables().values()  # data sets whose columns have names
        if recorded["data.name"] in of_tables and (name in of_tables or is_object(name)):
            remain += OF_ROWS if name == OF_A_FILE.name else OF_ROWS[:1]
        if name == OF_STORED_ARRAYS.name:
            remain += _OF_ARRAYS
        kept = [a for a in kept if not a.key.startswith("data.") or a.key.startswith(remain)]
    return kept
