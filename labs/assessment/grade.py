"""Grades a submission of the assessment: trains it, and evaluates what it saved on samples that it never had.

python labs/assessment/grade.py SUBMISSION.py [--set cifar10 --data FOLDER] [--ranks 2] [--target 0.7] [--minutes 8] [--json]

README.md in this folder has the rules, the verdicts and their exit codes.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import data
import model_file
from job import run_job
from judge import CODES, Verdict, judge, seen_z
from net import Net

from hvdtrain.errors import USER, UserError

HERE = Path(__file__).resolve().parent
MOST_SCRIPT_BYTES = 100_000  # a script has no room for weights


class Grade(NamedTuple):
    """The verdict and what led to it."""

    verdict: Verdict
    why: str
    accuracy: float | None  # on the hidden samples; None: there is no model to evaluate
    accuracy_given: float | None  # on val.npz
    seen_z: float | None  # judge.seen_z()
    seconds: float  # of the job, its start included
    output: str  # the end of what the job printed


def main() -> int:
    options = parse()
    try:
        script = check_script(options.submission)
        parts = data.split(*data.official(options.set, options.data), options.secret)
        with tempfile.TemporaryDirectory(prefix="grade") as scratch:
            grade = run(script, parts, options, Path(scratch))
    except UserError as error:
        print(error, file=sys.stderr)
        return USER
    report(grade, options)
    return CODES[grade.verdict]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("submission", type=Path, metavar="SUBMISSION.py")
    data.add_data_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target", type=float, help="accuracy on the hidden samples (default: the set's, data.py)")
    parser.add_argument("--minutes", type=float, help="the time limit, from mpirun's start to its end (default: the set's)")
    parser.add_argument(
        "--silence", type=float, metavar="S", help="seconds without a line after which a job hangs (120, at most half the limit)"
    )
    parser.add_argument("--secret", type=int, help="of an earlier grading, to repeat it (default: random)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the standard output")
    options = parser.parse_args()
    if (
        options.ranks < 1
        or (options.silence is not None and options.silence <= 0)
        or (options.minutes is not None and options.minutes <= 0)
    ):
        parser.error("--ranks, --minutes and --silence are above 0")
    if options.target is not None and not 0 < options.target <= 1:
        parser.error("--target is a share of the samples, above 0, at most 1")
    options.target = data.SETS[options.set].target if options.target is None else options.target
    options.minutes = options.minutes or data.SETS[options.set].minutes
    options.silence = options.silence or min(120.0, options.minutes * 30)
    options.secret = secrets.randbits(64) if options.secret is None else options.secret
    return options


def check_script(path: Path) -> Path:
    """Raises UserError where it is no script of an ordinary size."""
    if not path.is_file():
        raise UserError("there is no such file", str(path), "the path of a Python script")
    if path.stat().st_size > MOST_SCRIPT_BYTES:
        what = f"the script has {path.stat().st_size:,} bytes, at most {MOST_SCRIPT_BYTES:,} are taken"
        raise UserError(what, str(path), "a submission is one script, without weights or data in it")
    return path


def run(script: Path, parts: data.Parts, options: argparse.Namespace, scratch: Path) -> Grade:
    """Runs the script in a folder of its own, which has net.py too, and judges what it leaves."""
    work = scratch / "work"
    work.mkdir()
    shutil.copy(script, work / "submission.py")
    shutil.copy(HERE / "net.py", work)
    data.write(parts, scratch / "data")
    arguments = ["--data", str(scratch / "data")]
    ended = run_job(work / "submission.py", arguments, options.ranks, options.minutes * 60, options.silence, scratch / "output")

    def without_model(verdict: Verdict, why: str) -> Grade:
        return Grade(verdict, why, None, None, None, ended.seconds, ended.output)

    if ended.how == "too slow":
        return without_model("too slow", f"still running after {options.minutes:g} minutes")
    if ended.how == "hangs":
        return without_model("hangs", f"printed nothing for {options.silence:g} s")
    if ended.code:
        return without_model("crashed", f"mpirun ended with code {ended.code}; the end of its output is below")
    file = model_file.find(work)
    if file is None:
        return without_model("no model", f"the job ended without any of {', '.join(model_file.NAMES)} in its folder")
    net = Net(parts.train.x.shape[1], parts.classes)
    try:
        model_file.load(file, net)
        given, hidden = (model_file.answers(net, part.x, part.y, parts.stats) for part in (parts.given, parts.hidden))
    except model_file.WrongModel as error:
        return without_model("wrong model", str(error))
    verdict, why = judge(given, hidden, options.target)
    return Grade(verdict, why, hidden.accuracy, given.accuracy, seen_z(given.loss, hidden.loss), ended.seconds, ended.output)


def report(grade: Grade, options: argparse.Namespace) -> None:
    """To the standard output: two lines, and the end of the job's output where it left no model; or JSON."""
    if options.json:
        limits = {name: getattr(options, name) for name in ("set", "ranks", "target", "minutes", "silence", "secret")}
        print(json.dumps({**grade._asdict(), "code": CODES[grade.verdict], **limits}))
        return
    if grade.accuracy is None and grade.output:
        print(f"{grade.output}\n")
    print(f"{grade.verdict}: {grade.why}")
    print(f"{grade.seconds:.1f} s of {options.minutes:g} minutes on {options.ranks} ranks, {options.set}; again: --secret {options.secret}")


if __name__ == "__main__":
    sys.exit(main())
