"""What --help and list print: descriptions of keys from the schema, of options from the plugins; no framework is imported."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from hvdtrain.config import plugins, schema
from hvdtrain.config.options import options_of, shown
from hvdtrain.errors import MEANINGS, UserError, nearest

USAGE = """\
hvdtrain trains deep networks on many workers.

  python -m hvdtrain [--config FILE] [key=value ...]                one process
  mpirun -np 8 -H n1:4,n2:4 python -m hvdtrain [key=value ...]     eight
  python -m hvdtrain plan [--config FILE] [key=value ...]           what the job would do on 1, 8, 64 and 512 ranks; trains nothing
      [--ranks 1,8,64,512] [--png FILE] [--all]                     other ranks, a picture of lr and batch, all names
      [--samples N --image HxWxC --classes K]                       without reading data
  python -m hvdtrain launch -np 8 [-H n1:4,n2:4] -- [key=value ...] the command line for the MPI or SLURM that is here; --dry-run prints it
  mpirun ... python -m hvdtrain check [--json FILE] [key=value ...] what would fail on these ranks, and how to fix it; trains nothing
  python -m hvdtrain bench step [key=value ...]                     images/s and the time of each phase of a step; also bench data
  mpirun -np 2 python -m hvdtrain bench allreduce [key=value ...]   speed of allreduce, compared with plain MPI
  python -m hvdtrain bench scaling [--ranks 1,2,4] [key=value ...]  real jobs on more ranks, and a prediction for 8 to 8192
  python -m hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500 [key=value ...]   by hand, on each node, without MPI
  python -m hvdtrain export RUN --to FILE                          weights for inference elsewhere: model.safetensors, or model.pt
      [--checkpoint newest|best|step-00000120] [--force]            of which checkpoint; replace FILE
  python -m hvdtrain report RUN [RUN ...] [--to FOLDER]            one page with figures, of one job or of several, running, done or killed

  --max-time 3.5h    stop with a checkpoint before that time is over, exit code 75: the same command continues the job
  --help [SECTION]   this page, or the keys and options of one section
  --print-config     the resolved configuration, ready for --config
  --version          the version
  list               the names that data.name, model.name, optim.name, comm.engine, framework and log.trackers take
  schema             a JSON Schema of configuration files, with which editors complete and check them

Exit codes:
{codes}

keys, defaults"""

# Where the plugins are that a key names, and when.
_FOLDERS = {
    "data.name": schema.OPEN_SECTIONS["data"],
    "model.name": schema.OPEN_SECTIONS["model"],
    "optim.name": schema.OPEN_SECTIONS["optim"],
    "model.name with framework=jax": plugins.folder_of("model", "jax"),
    "comm.engine": "comm",
    "framework": "frameworks",
    "log.trackers": "events/trackers",
}


def help_text(section: str | None) -> str:
    """Every key; or the keys of one section, with the options of its plugins. Raises UserError for an unknown section."""
    if section is None:
        codes = "\n".join(f"  {code:3} {meaning}" for code, meaning in MEANINGS.items())
        lines = [USAGE.format(codes=codes), *_rows(schema.Config, "")]
        for name, kind in schema.SECTIONS.items():
            lines += ["", *_rows(kind, f"{name}.")]
        return "\n".join([*lines, "", "--help data, --help model, --help optim: the options of each name"])
    if section not in schema.SECTIONS:
        raise UserError(f"no such section: {section}", "--help", nearest(section, sorted(schema.SECTIONS)))
    lines = _rows(schema.SECTIONS[section], f"{section}.")
    return "\n".join(lines + (_option_rows(section) if section in schema.OPEN_SECTIONS else []))


def list_text() -> str:
    """The names of every plugin, a line each with the first line of its file."""
    lines = []
    for key, folder in _FOLDERS.items():
        lines.append(key)
        lines += [f"  {name:14} {_first_line(path)}" for name, path in plugins.files(folder).items()]
    more = "model.name also takes package.module:Class, optim.name any class of torch.optim by its path, and comm.engine takes auto"
    return "\n".join([*lines, more])


def _rows(kind: type[BaseModel], prefix: str) -> list[str]:
    """A row for each key of a section, or each option of a plugin: key=default, then its description."""
    fields = {name: info for name, info in kind.model_fields.items() if info.annotation not in schema.SECTIONS.values()}
    keys = {name: f"{prefix}{name}={shown(info.get_default(call_default_factory=True))}" for name, info in fields.items()}
    return [f"  {keys[name]:34} {info.description or ''}".rstrip() for name, info in fields.items()]


def _option_rows(section: str) -> list[str]:
    """The options of each plugin of a section."""
    lines: list[str] = []
    for key, folder in _FOLDERS.items():
        head, _, condition = key.partition(" ")
        if head != f"{section}.name":
            continue
        names: dict[Path, list[str]] = {}  # by file: some names share one
        for name, path in plugins.files(folder).items():
            names.setdefault(path, []).append(name)
        for path, shared in names.items():
            lines += ["", f"{head}={'|'.join(shared)} {condition}".rstrip() + f": {_first_line(path)}"]
            lines += _rows(options_of(path), f"{section}.")
    return lines


def _first_line(path: Path) -> str:
    """The first line of a file's docstring, with which every file begins: parsing 46 files would take 0.1 s."""
    with path.open() as file:
        return file.readline().strip().strip('"')
