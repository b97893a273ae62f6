"""Limits of the system (ulimit): what is reached and what to do, without a traceback."""

from __future__ import annotations

from pathlib import Path

from ranks import python

JOB = ["framework=numpy", "model.name=linear", "max_steps=2"]
PROGRAM = """
import resource, signal, os, sys, threading
from hvdtrain.__main__ import main
{}
sys.exit(main())
"""


def test_too_few_addresses(tmp_path: Path) -> None:
    """180 MB (ulimit -v 175781): no job starts. With 300 MB (292968) torch cannot be loaded."""
    for size, job in ((180_000_000, JOB), (300_000_000, ["model.name=linear", "max_steps=2"])):
        code = PROGRAM.format(f"resource.setrlimit(resource.RLIMIT_AS, ({size}, {size}))")
        result = python(["-c", code, *job, f"run={tmp_path / 'run'}"], is_warm=False)
        assert result.returncode in (2, 83) and "Traceback" not in result.stderr, result
        message = (
            "this process has no more address space\n  where: ulimit -v "
            f"{size // 1024} kB\n  fix: ulimit -v unlimited: "
        )
        assert result.stderr.startswith(f"hvdtrain: {message}"), result


def test_too_few_threads(tmp_path: Path) -> None:
    """No thread starts: as with ulimit -u, which does not hold for root, its stack cannot be
    made."""
    code = PROGRAM.format("threading.stack_size(1 << 46)")
    result = python(["-c", code, *JOB, f"run={tmp_path / 'run'}"], is_warm=False)
    assert result.returncode == 2, result
    assert result.stderr.startswith(
        "hvdtrain: the system refuses this process more threads\n  where: "
    ), result
    assert result.stderr.endswith(
        "\n  fix: raise the limit; or fewer: OMP_NUM_THREADS=1 data.readers=1\n"
    ), result


def test_ctrl_c_of_a_command_is_no_error_of_ours() -> None:
    code = (
        "import signal, hvdtrain.__main__ as program; program.run_command = lambda words: "
        "signal.raise_signal(signal.SIGINT)"
    )
    result = python(["-c", f"{code}; program.sys.exit(program.main())", "list"], is_warm=False)
    assert (result.returncode, result.stderr) == (130, "")
