"""What --help and list print: the docstrings of the schema and of the leaves, read without importing any framework."""

from __future__ import annotations

import ast
from pathlib import Path

from hvdtrain.config import plugins, schema
from hvdtrain.config.section import Section
from hvdtrain.errors import MEANINGS, UserError, nearest

USAGE = """\
hvdtrain trains deep networks on many workers.

  python -m hvdtrain [--config FILE] [key=value ...]                one process
  mpirun -np 8 -H n1:4,n2:4 python -m hvdtrain [key=value ...]     eight
  python -m hvdtrain plan [--config FILE] [key=value ...]           what they would do on 1, 8, 64 and 512 ranks; trains nothing
      [--ranks 1,8,64,512] [--png FILE] [--all]                     other ranks, a picture of lr and batch, all names
      [--samples N --image HxWxC --classes K]                       without reading data
  python -m hvdtrain launch -np 8 [-H n1:4,n2:4] -- [key=value ...] the command line for the MPI or SLURM that is here; --dry-run prints it
  mpirun ... python -m hvdtrain check [--json FILE] [key=value ...] what would go wrong with these ranks, and what to do; trains nothing
  python -m hvdtrain bench step [key=value ...]                     images/s, and where a step's time goes; also bench data
  mpirun -np 2 python -m hvdtrain bench allreduce [key=value ...]   how fast the ranks add up, against plain MPI
  python -m hvdtrain bench scaling [--ranks 1,2,4] [key=value ...]  real jobs on more ranks, and a prediction for 8 to 8192
  python -m hvdtrain --num-nodes 2 --node-id 0 --num-gpus 4 comm.address=n1:29500 [key=value ...]   by hand, on each node, without MPI
  python -m hvdtrain export RUN --to FILE                          weights for inference elsewhere: model.safetensors, or model.pt
      [--checkpoint newest|best|step-00000120] [--force]            of which checkpoint; replace FILE
  python -m hvdtrain report RUN [RUN ...] [--to FOLDER]            one page with figures, of one job or of several, running, done or killed

  --max-time 3.5h    stop before that time is over, with a checkpoint and exit code 75: the same command goes on
  --help [SECTION]   this page, or the keys and options of one section
  --print-config     the resolved configuration, ready for --config
  --version          the version
  list               the names that data.name, model.name, optim.name, comm.engine and framework know

Exit codes:
{codes}

keys, defaults"""

_FOLDERS = {
    **schema.OPEN_SECTIONS,
    "model with framework=jax": "frameworks/jax/models",
    "comm": "comm",
    "framework": "frameworks",
    "log.trackers": "events/trackers",
}


def help_text(section: str | None) -> str:
    """Every key, or one section with its options."""
    if section is None:
        codes = "\n".join(f"  {code:3} {meaning}" for code, meaning in MEANINGS.items())
        body = [USAGE.format(codes=codes), *_rows(schema.Config, "")]
        for name, kind in schema.SECTIONS.items():
            body += ["", *_rows(kind, f"{name}.")]
        return "\n".join([*body, "", "--help data, --help model, --help optim: the options of each name"])
    if section not in schema.SECTIONS:
        raise UserError(f"no such section: {section}", "--help", nearest(section, sorted(schema.SECTIONS)))
    body = _rows(schema.SECTIONS[section], f"{section}.")
    return "\n".join(body + (_options(section) if section in schema.OPEN_SECTIONS else []))


def list_text() -> str:
    """The names of every leaf, a line each with the first line of its file."""
    lines = []
    for section, folder in _FOLDERS.items():
        head, _, when = section.partition(" ")
        lines.append(
            {"comm": "comm.engine", "framework": "framework", "log.trackers": "log.trackers"}.get(head, f"{head}.name {when}".rstrip())
        )
        lines += [f"  {name:14} {_first_line(path)}" for name, path in plugins.files(folder).items()]
    more = "model.name also takes package.module:Class, optim.name any class of torch.optim by its path, and comm.engine takes auto"
    return "\n".join([*lines, more])


def _rows(kind: type[Section], prefix: str) -> list[str]:
    """A row for each key of a section: key=default, then its description."""
    rows = []
    for name, info in kind.model_fields.items():
        if name not in schema.SECTIONS:
            default = info.get_default(call_default_factory=True)
            key = f"{prefix}{name}={'' if default is None else default}"
            rows.append(f"  {key:34} {info.description}")
    return rows


def _options(section: str) -> list[str]:
    """The options of each leaf of a section: its build()'s keyword-only parameters and its docstring."""
    lines: list[str] = []
    for when, folder in ((key.removeprefix(section), folder) for key, folder in _FOLDERS.items() if key.split()[0] == section):
        done: dict[Path, list[str]] = {}
        for name, path in plugins.files(folder).items():
            done.setdefault(path, []).append(name)
        for path, names in done.items():
            build = plugins.entry(path)
            lines += ["", f"{section}.name={'|'.join(names)}{when}: {_first_line(path)}"]
            texts = _option_texts(ast.get_docstring(build) or "")
            given = plugins.options(build).items()
            lines += [f"  {f'{section}.{option}={value}':34} {texts.get(option, '')}".rstrip() for option, value in given]
    return lines


def _option_texts(docstring: str) -> dict[str, str]:
    """The lines `option: text` of a docstring."""
    pairs = (line.strip().partition(": ") for line in docstring.splitlines())
    return {name: text for name, _, text in pairs if name.isidentifier()}


def _first_line(path: Path) -> str:
    """The first line of a file's docstring, with which every file begins; 46 files are parsed 0.1 s slower."""
    with path.open() as file:
        return file.readline().strip().strip('"')
