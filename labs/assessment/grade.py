"""Grades a submission of the assessment: trains it, and evaluates what it saved on samples that it never had.

python labs/assessment/grade.py SUBMISSION.py [--set cifar10 --data FOLDER] [--ranks 2] [--target 0.7] [--train-target 0.9] [--minutes 8] [--json]

README.md in this folder has the rules, the verdicts and their exit codes.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import data
import model_file
import share
from job import run_job
from judge import CODES, Verdict, judge, seen_z
from net import Net

from hvdtrain.errors import USER, UserError
from hvdtrain.extras.launch.mpirun import available_cores

HERE = Path(__file__).resolve().parent
MOST_SCRIPT_BYTES = 100_000  # a script has no room for weights
MOST_SECRET_DIGITS = 1000
INTERRUPTED = 130  # 128 + SIGINT, as a shell tells it


class Grade(NamedTuple):
    """The verdict and what led to it."""

    verdict: Verdict
    why: str
    accuracy: float | None  # on the hidden samples; None: there is no model to evaluate
    accuracy_given: float | None  # on val.npz
    seen_z: float | None  # judge.seen_z()
    trained_samples: list[int | None]  # on each rank; None: it did not train the network
    train_accuracy: float | None  # on train.npz, if it has a target
    seconds: float  # of the job, its start included
    load: float  # of the machine at its end, mean over a minute
    output: str  # the end of what the job printed


def main() -> int:
    options = parse()
    try:
        script = check_script(options.submission)
        parts = data.split(*data.official(options.set, options.data), options.secret)
        with scratch_folder() as scratch:
            grade = run(script, parts, options, scratch)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER
    except KeyboardInterrupt:
        print(
            "interrupted: no verdict; the job's processes have ended, and its folder is removed",
            file=sys.stderr,
        )
        return INTERRUPTED
    report(grade, options)
    return CODES[grade.verdict]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is removed whatever a job has left in it: folders without rights, or thousands
    in one another."""
    path = Path(tempfile.mkdtemp(prefix="grade"))
    try:
        yield path
    finally:
        if path.is_dir() and not path.is_symlink():
            subprocess.run(["chmod", "-R", "u+rwX", path], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", path], check=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submission", type=Path, metavar="SUBMISSION.py")
    data.add_data_options(parser)
    parser.add_argument("--ranks", type=whole, default=2)
    parser.add_argument(
        "--target",
        type=share_of_samples,
        help="accuracy on the hidden samples (default: the set's, data.py)",
    )
    parser.add_argument(
        "--train-target",
        type=share_of_samples,
        help="accuracy on train.npz too, evaluated by the grader (default: none)",
    )
    parser.add_argument(
        "--minutes",
        type=amount,
        help="the time limit, from mpirun's start to its end (default: the set's)",
    )
    parser.add_argument(
        "--silence",
        type=amount,
        metavar="S",
        help="seconds without a line after which a job hangs (120, at most half the limit; the "
        "first line may take half the limit)",
    )
    parser.add_argument(
        "--secret", type=secret, help="of an earlier grading, to repeat it (default: random)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on the standard output"
    )
    options = parser.parse_args()
    options.target = data.SETS[options.set].target if options.target is None else options.target
    options.minutes = options.minutes or data.SETS[options.set].minutes
    options.silence = options.silence or min(120.0, options.minutes * 30)
    options.secret = secrets.randbits(64) if options.secret is None else options.secret
    return options


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def amount(text: str) -> float:
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def share_of_samples(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share of the samples: above 0, at most 1")
    return value


def number(text: str) -> float:
    """Not a number where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def secret(text: str) -> int:
    if not text.isdecimal() or len(text) > MOST_SECRET_DIGITS:
        raise argparse.ArgumentTypeError(f"{text} is no secret: a whole number from 0")
    return int(text)


def check_script(path: Path) -> Path:
    """Raises UserError where it is no script of an ordinary size."""
    if path.is_dir():
        raise UserError(
            "a submission is a script, and this is a folder",
            str(path),
            "the path of a Python script in it",
        )
    if not path.is_file():
        raise UserError("there is no such file", str(path), "the path of a Python script")
    if path.stat().st_size > MOST_SCRIPT_BYTES:
        what = (
            f"the script has {path.stat().st_size:,} bytes, at most {MOST_SCRIPT_BYTES:,} are taken"
        )
        raise UserError(
            what, str(path), "a submission is one script, without weights or data in it"
        )
    return path


def run(script: Path, parts: data.Parts, options: argparse.Namespace, scratch: Path) -> Grade:
    """Runs the script in a folder of its own, which has net.py too, and judges what it leaves."""
    work = scratch / "work"
    work.mkdir()
    shutil.copy(script, work / "submission.py")
    shutil.copy(HERE / "net.py", work / "plain_net.py")
    shutil.copy(HERE / "counting_net.py", work / "net.py")
    temporary = scratch / "tmp"
    temporary.mkdir()
    data.write(parts, scratch / "data")
    arguments = ["--data", str(scratch / "data")]
    ended = run_job(
        work / "submission.py",
        arguments,
        options.ranks,
        options.minutes * 60,
        options.silence,
        temporary,
    )

    shares = [share.read(work, rank) for rank in range(options.ranks)]
    samples = [None if one is None else one.samples for one in shares]

    def without_model(verdict: Verdict, why: str) -> Grade:
        load = os.getloadavg()[0]
        return Grade(
            verdict, why, None, None, None, samples, None, ended.seconds, load, ended.output
        )

    if ended.how == "too slow":
        return without_model(
            "too slow", f"still running after {counted(options.minutes, 'minute')}"
        )
    if ended.how == "hangs":
        first = f", or no first line in {max(options.silence, options.minutes * 30):g} s"
        return without_model("hangs", f"printed nothing for {options.silence:g} s{first}")
    if ended.code:
        return without_model(
            "crashed", f"mpirun ended with code {ended.code}; the end of its output is above"
        )
    file = model_file.find(work)
    if file is None:
        return without_model(
            "no model", f"the job ended without any of {', '.join(model_file.NAMES)} in its folder"
        )
    net = Net(parts.train.x.shape[1], parts.classes)
    try:
        model_file.load(file, net)
        given, hidden = (
            model_file.answers(net, part.x, part.y, parts.stats)
            for part in (parts.given, parts.hidden)
        )
        trained = None
        if options.train_target is not None:
            train = parts.train
            trained = model_file.answers(net, train.x, train.y, parts.stats).accuracy
    except model_file.WrongModel as error:
        return without_model("wrong model", str(error))
    verdict, why = judge(given, hidden, options.target)
    if trained is not None and verdict in ("passed", "target missed"):
        why = f"{why}; {trained:.4f} on train.npz, the target is {options.train_target:g}"
        verdict = "target missed" if trained < options.train_target else verdict
    complaint = share.complaint(shares, share.most_samples(len(parts.train.y), options.ranks))
    if verdict == "passed" and complaint:
        verdict = "not shared"
        why = f"{why}; {complaint}"
    z = seen_z(given.loss, hidden.loss)
    return Grade(
        verdict,
        why,
        hidden.accuracy,
        given.accuracy,
        z,
        samples,
        trained,
        ended.seconds,
        os.getloadavg()[0],
        ended.output,
    )


def report(grade: Grade, options: argparse.Namespace) -> None:
    """To the standard output: the end of the job's output where it left no model, then two lines,
    the verdict last; or JSON."""
    if options.json:
        limits = {
            name: getattr(options, name)
            for name in ("set", "ranks", "target", "train_target", "minutes", "silence", "secret")
        }
        print(json.dumps({**grade._asdict(), "code": CODES[grade.verdict], **limits}))
        return
    if grade.accuracy is None and grade.output:
        print(quoted(grade.output))
    limit = counted(options.minutes, "minute")
    ranks = counted(options.ranks, "rank")
    print(
        f"{grade.seconds:.1f} s of {limit} on {ranks}, load {grade.load:.1f} on "
        f"{counted(available_cores(), 'core')}, {options.set}; again: --secret {options.secret}"
    )
    print(f"{grade.verdict}: {grade.why}")


def quoted(output: str) -> str:
    """What a job printed, as nothing but its own words: each line marked, without the characters
    that move a cursor or hide text."""
    lines = output.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(
        "  | " + "".join(c for c in line.replace("\t", "    ") if c.isprintable()) for line in lines
    )


def counted(amount: float, unit: str) -> str:
    return f"{amount:g} {unit}" if amount == 1 else f"{amount:g} {unit}s"


if __name__ == "__main__":
    # as Ctrl-C: else the job would outlive this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # a job may print what this terminal cannot show
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
