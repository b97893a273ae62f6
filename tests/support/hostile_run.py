"""Run folders as a stranger may make them, and what the commands do with them.

`hostile_run.py FOLDER planted [N [NAME ...]]` plants odd things under names and runs each command:
all cases, or N of them. `hostile_run.py FOLDER swapped N` swaps names for links while a job writes,
for N jobs. `hostile_run.py FOLDER mutated N [FILE ...]` damages the bytes of files, N times each;
of a checkpoint every other time with sums that fit. A line of JSON for each case that went wrong,
and one with the counts at the end. Commands sync what they write: a FOLDER in memory (/dev/shm)
takes a third of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz_bytes import mutated
from PIL import Image

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.config import plugins
from hvdtrain.core import extras
from hvdtrain.errors import DIVERGED, DONE, USER, UserError
from hvdtrain.events.log import Event
from hvdtrain.records.run import read_run

# of os.fork(), since Python 3.12
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

JOB = [
    "framework=numpy",
    "model.name=linear",
    "comm.engine=single",
    "data.name=synthetic",
    "data.shape=[4,4,1]",
    "data.samples=16",
]
JOB += ["data.val_samples=8", "batch.size=8", "checkpoint.every_steps=1", "log.every_steps=1"]
STEP = "checkpoints/step-00000002"
CHECKPOINT = tuple(
    f"{STEP}/{name}"
    for name in ("weights.safetensors", "optimizer.safetensors", "progress.json", "SHA256SUMS")
)
MUTATED = ("config.yaml", "events.jsonl", "mlflow_run.json", *CHECKPOINT)
TEMPORARY = (
    ".config.yaml.unfinished",
    f".report.html.{os.getpid()}.unfinished",
    "checkpoints/.step-00000003.unfinished",
)
DRAWN = "samples/step-00000002.png"
FOLDERS = (
    "checkpoints",
    STEP,
    "samples",
    "ranks",
    "tensorboard",
    "mlflow",
    "wandb",
    "profile",
    "checkpoints/step-00000003.replaced",
)
NAMES = (
    *MUTATED,
    DRAWN,
    ".hvdtrain",
    "wandb_run.json",
    "ranks/rank-00000.log",
    "report.html",
    "report-loss.png",
    *TEMPORARY,
    *FOLDERS,
)
READERS = {  # the commands that read a file
    "config.yaml": ("resume=", "--config", "export", "evaluate", "predict"),
    "events.jsonl": ("run=", "evaluate", "read", *({"report"} & extras.commands().keys())),
    "mlflow_run.json": ("read",),
    **dict.fromkeys(CHECKPOINT, ("run=", "export", "evaluate", "predict")),
}
MEMORY_BYTES = 2**30  # that a command may take more than this process has
LIMIT_S = 800  # for a case that hangs
STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
)


def sound_run(run: Path) -> None:
    """Two checkpoints, events, the log of a rank, a tracker's id."""
    assert main([*JOB, "log.per_rank=true", "max_steps=2", f"run={run}"]) == DONE
    (run / "mlflow_run.json").write_text('{"run_id": "abc123"}\n')
    (run / "wandb_run.json").write_text('{"run_id": "abc123"}\n')
    (run / "samples").mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(run / DRAWN)


def outside_folder(top: Path) -> Path:
    """What nothing may touch: a file, a folder with a file, another run with checkpoints, images,
    the home and the current folder."""
    outside = top / "outside"
    for name in ("folder", "home", "images"):
        (outside / name).mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.full((4, 4), 80 * number, np.uint8)).save(
            outside / "images" / f"{number}.png"
        )
    for path in (outside / "file", outside / "folder" / "file"):
        path.write_text("precious")
    for step in (1, 2, 3):
        folder = outside / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_text("precious")
    return outside


def tree(folder: Path) -> dict[str, str]:
    """Each path with kind, mode, size, times and content."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = (
            hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        )
        found[str(path)] = (
            f"{status.st_mode:o} {status.st_size} {status.st_mtime_ns} {status.st_ino} {content}"
        )
    return found


def nested(levels: int) -> Callable[[Path, Path], Any]:
    def plant(path: Path, outside: Path) -> None:
        tail = "]" * levels
        path.write_text(
            f'{{"time": 1.0, "kind": "step", "step": 1, "format": 3, "run_id": '
            f'{"[" * levels}{tail}, "x": {"[" * levels}{tail}}}\n'
        )

    return plant


def sparse(path: Path, outside: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"time": 1.0, "kind": "')
        file.truncate(2**40)


def bind_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        home = os.open(path.parent, os.O_RDONLY)
        door.bind(f"/proc/self/fd/{home}/{path.name}"[:107])
        os.close(home)


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "link to the checkpoints of another run": lambda path, outside: path.symlink_to(
        outside / "run" / "checkpoints"
    ),
    "link to a name that is free": lambda path, outside: path.symlink_to(outside / "new"),
    "link to itself": lambda path, outside: path.symlink_to(path.name),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "hard link": lambda path, outside: os.link(outside / "file", path),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": bind_socket,
    "device": lambda path, outside: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "folder": lambda path, outside: path.mkdir(),
    "sparse terabyte": sparse,
    "900 levels": nested(900),
    "100,000 levels": nested(100_000),
}


def commands(run: Path, top: Path, *, page: bool = False) -> dict[str, Callable[[], int]]:
    """What a user may do with a run folder."""
    to = top / "exported"
    images = top / "outside" / "images"
    to.mkdir(exist_ok=True)

    def report() -> int:
        """Without `page` only the part that takes no seconds to draw."""
        if page:
            return main(["report", str(run)])
        command = import_module(extras.commands()["report"].module)
        record = read_run(run)
        command.render_page([record], command.run_labels([record]), [], "report")
        return DONE

    def read() -> int:
        hvdtrain.read(run)
        if "mlflow" in plugins.files("events/trackers"):
            mlflow = plugins.load("events/trackers", "mlflow", "log.trackers")
            mlflow.load_run_id(run / "mlflow_run.json", Event(0.0, "start", 1, {}))
        return DONE

    return {
        "run=": lambda: main(
            [*JOB, "log.per_rank=true", "max_steps=3", f"run={run}", "resume=auto"]
        ),
        "resume=": lambda: main(["comm.engine=single", "max_steps=4", f"resume={run}"]),
        "--config": lambda: main(
            [
                "--config",
                str(run / "config.yaml"),
                "comm.engine=single",
                "max_steps=1",
                f"run={to / 'run'}",
            ]
        ),
        "export": lambda: main(["export", str(run), "--to", str(to / "m.safetensors"), "--force"]),
        "evaluate": lambda: main(["evaluate", str(run), "comm.engine=single"]),
        "predict": lambda: main(
            [
                "predict",
                str(run),
                "--images",
                str(images),
                "--to",
                str(to / "p.csv"),
                "--force",
                "--checkpoint",
                "best",
                "comm.engine=single",
            ]
        ),
        "read": read,
        **({"report": report} if "report" in extras.commands() else {}),
    }


def export_for_torch(run: Path, top: Path) -> int:
    """The one command here that imports torch."""
    return main(["export", str(run), "--to", str(top / "m.pt"), "--force"])


class Refused(BaseException):
    """A forbidden thing was tried."""


def outcome(command: Callable[[], int]) -> str:
    """Returns "" if a command succeeds or fails with a message; otherwise what went wrong."""
    captured = io.StringIO()
    code = -1
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        try:
            code = command()
        except UserError:
            code = USER
        except BaseException:
            return traceback.format_exc()[-1500:]
    text = captured.getvalue()
    # altered weights whose sums fit may be so large that the loss overflows
    in_words = code in (
        DONE,
        USER,
        DIVERGED,
    )
    return "" if in_words and "Traceback" not in text else text[-1500:]


def in_child(work: Callable[[], str]) -> str:
    """Returns the result of work() in a separate process with little memory, which may not start
    processes or open connections."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.alarm(LIMIT_S)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event.startswith(STARTS):
                raise Refused(event)

        sys.addaudithook(watch)
        with os.fdopen(writing, "w") as file:
            file.write(work())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or ("" if code == 0 else f"the process ended with {code}")


def copied(sound: Path, run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run, symlinks=True)


def clear(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def planted(top: Path, names: list[str], most: int) -> Iterator[tuple[str, str]]:
    """(case, what went wrong) of every kind under each name with each command; `most`: so many of
    them, the same in every run; 0: all."""
    outside = top / "outside"
    run = top / "run"
    before = tree(outside)
    cases = list(product(names, KINDS, commands(run, top)))
    for name, kind, which in Random(1).sample(cases, most) if most else cases:
        copied(top / "sound", run)
        clear(run / name)
        try:
            KINDS[kind](run / name, outside)
        except PermissionError:
            continue  # a device, without root
        wrong = in_child(
            lambda name=name, which=which: outcome(commands(run, top, page="report" in name)[which])
        )  # type: ignore[misc]
        if (now := tree(outside)) != before:
            wrong = f"outside has changed: {set(now.items()) ^ set(before.items())}; {wrong}"
            before = now
        yield f"{which} {name}: {kind}", wrong


def swapped(top: Path, rounds: int) -> Iterator[tuple[str, str]]:
    """A job trains and writes while another process swaps a name of the run folder for a link and
    back, at random moments."""
    outside = top / "outside"
    run = top / "run"
    before = tree(outside)
    for number in range(rounds):
        random = Random(number)
        copied(top / "sound", run)
        targets = [
            outside / "file",
            outside / "folder",
            outside / "run" / "checkpoints",
            outside / "new",
        ]
        swapper = os.fork()
        if not swapper:
            parent = os.getppid()
            for count in range(10**9):
                if os.getppid() != parent:
                    os._exit(0)
                path = run / random.choice(NAMES)
                kept = run / f".kept{count}"
                with contextlib.suppress(OSError):
                    is_there = os.path.lexists(path)
                    if is_there:
                        os.rename(path, kept)
                    path.symlink_to(random.choice(targets))
                    time.sleep(random.random() / 500)
                    if path.is_symlink():
                        path.unlink()
                    if is_there:
                        os.rename(kept, path)
                time.sleep(random.random() / 500)
        wrong = in_child(
            lambda: outcome(
                lambda: main(
                    [
                        *JOB,
                        "log.per_rank=true",
                        "max_steps=30",
                        f"run={run}",
                        "checkpoint.keep_last=1",
                    ]
                )
            )
        )
        wrong = wrong or in_child(lambda: outcome(lambda: export_for_torch(run, top)))
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)
        if (now := tree(outside)) != before:
            wrong = f"outside has changed: {set(now.items()) ^ set(before.items())}; {wrong}"
            before = now
        yield f"swapped, seed {number}", wrong


def mutations(top: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """`count` damaged copies of each file, 50 in a process; the commands that read the file."""
    outside = top / "outside"
    before = tree(outside)
    for name in names:
        for first in range(0, count, 50):
            said = in_child(lambda name=name, first=first: several(top, name, first))  # type: ignore[misc]
            if (now := tree(outside)) != before:
                said = f"outside has changed; {said}"
                before = now
            yield from ((f"{name} {first + number}", "") for number in range(49))
            yield f"{name} {first} to {first + 49}", said


def several(top: Path, name: str, first: int) -> str:
    run = top / "run"
    wrong = []
    data = (top / "sound" / name).read_bytes()
    if name != "config.yaml":
        shorten_config(top / "sound")
    for number in range(first, first + 50):
        rng = np.random.default_rng([sum(name.encode()), number])
        for command in READERS[name]:
            copied(top / "sound", run)
            (run / name).write_bytes(mutated(rng, data))
            if number % 2 and name in CHECKPOINT[:-1]:
                make_sums_fit(run / STEP)
            if said := outcome(commands(run, top)[command]):
                wrong.append(f"{command} {name} {number}: {said}")
    return "\n".join(wrong)


def shorten_config(run: Path) -> None:
    """Removes the keys with default values from the configuration, so it is read in a tenth of the
    time."""
    with (run / "config.yaml").open("w") as file:
        file.writelines(
            f"{key}: {value}\n"
            for key, _, value in (word.partition("=") for word in [*JOB, "log.per_rank=true"])
        )


def make_sums_fit(checkpoint: Path) -> None:
    """Makes the checksums fit, like an attacker who alters a checkpoint."""
    names = [Path(path).name for path in CHECKPOINT[:-1]]
    sums = [
        f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n"
        for name in names
    ]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


def work(top: Path, what: str, *arguments: str) -> int:
    """Prints each case that went wrong, then the counts. Returns 1 if a case went wrong."""
    began_s = time.monotonic()
    # which it would make in another home, with a program
    fonts = str(Path.home() / ".cache" / "matplotlib")
    home = outside_folder(top) / "home"
    os.environ |= {"HOME": str(home), "MPLCONFIGDIR": fonts}
    os.chdir(home)
    with contextlib.redirect_stdout(io.StringIO()):
        sound_run(top / "sound")
        copy = top / "sound-copy"
        usual = list(commands(copy, top).values())
        if what == "swapped":
            usual.append(lambda: export_for_torch(copy, top))
        for command in usual:
            # what they import is there, and has started what it may, before memory and starts are
            # counted
            copied(top / "sound", copy)
            assert command() == DONE
    if what == "planted":
        cases = planted(
            top, list(arguments[1:]) or list(NAMES), int(arguments[0]) if arguments else 0
        )
    elif what == "swapped":
        cases = swapped(top, int(arguments[0]))
    else:
        cases = mutations(top, int(arguments[0]), list(arguments[1:]) or list(MUTATED))
    tried = failed = 0
    for case, wrong in cases:
        tried += 1
        (top / "tried").write_text(f"{tried}: {case}\n")
        if wrong:
            failed += 1
            print(json.dumps({"case": case, "wrong": re.sub(r"\s+", " ", wrong)}), flush=True)
    largest_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(
        json.dumps(
            {
                "tried": tried,
                "wrong": failed,
                "largest_mib": largest_mib,
                "seconds": round(time.monotonic() - began_s, 1),
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), *sys.argv[2:]))
