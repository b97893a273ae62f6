"""python install.py --extras NAME ...: installs this clone in the Python that runs it, from files
that constraints.txt lists; make runs it.

pip chooses packages from the indexes that it is set up for; where there is no GPU, the CPU builds
of what is accepted unchecked. Each file is compared with the sha256 in constraints.txt before
anything of it runs; only wheels are taken, but for --source. `python install.py --lock` (make lock)
writes constraints.txt anew. Standard library only.
"""

from __future__ import annotations

import argparse
import configparser
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
LOCK = ROOT / "constraints.txt"
HEADER = """\
# The versions and files that `make` installs and the tests ran with, as install.py reads them; `make lock` writes this file from setup.cfg.
# It keeps hashes of unchanged versions that PyPI does not list: of torch 2.13.0, the CPU build for Python 3.11 and x86_64.
"""  # noqa: E501


# and what its builds need, in versions of their own
TORCH = (
    "torch",
    "torchvision",
    "triton",
    "pytorch-triton*",
    "nvidia-*",
    "cuda-*",
)
SITE = "site"  # of --torch
SUMS = "SHA256SUMS"  # of the wheels in a wheelhouse


class Locked(NamedTuple):
    """A package in constraints.txt."""

    requirement: str  # "triton==3.7.1 ; sys_platform == 'linux'"
    hashes: tuple[str, ...]  # "sha256:..."

    @property
    def name(self) -> str:
        return canonical(re.split(r"[=\s]", self.requirement)[0])

    @property
    def version(self) -> str:
        return self.requirement.split(";")[0].partition("==")[2].strip()


def canonical(name: str) -> str:
    """One spelling of a package's name for Jinja2, ruamel.yaml, typing_extensions."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[Locked]:
    """The packages of a constraints file with hashes."""
    lines = [
        line
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return [
        Locked(line.partition("--hash=")[0].strip(), tuple(re.findall(r"--hash=(\S+)", line)))
        for line in lines
    ]


def lock_text(packages: Sequence[Locked]) -> str:
    """The text of a constraints file."""
    return HEADER + "".join(
        " \\\n    ".join([locked.requirement, *(f"--hash={digest}" for digest in locked.hashes)])
        + "\n"
        for locked in packages
    )


def requirements(extras: Sequence[str]) -> list[str]:
    """What setup.cfg requires, with these extras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = [
        setup["options"]["install_requires"],
        *(setup["options.extras_require"][extra] for extra in extras),
    ]
    return [line.strip() for line in "\n".join(lines).splitlines() if line.strip()]


def pip(*arguments: str) -> None:
    """Runs pip of this Python, which prints its own errors; exits with its status where it
    fails."""
    if status := subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode:
        sys.exit(status)


def of_site() -> list[str]:
    """Packages that this Python finds outside of its own environment: those of a module, a
    container or conda."""
    inside = Path(sys.prefix).resolve()
    found = [
        (one.metadata["Name"], Path(str(one.locate_file(""))).resolve())
        for one in importlib.metadata.distributions()
    ]
    return sorted(
        {canonical(name) for name, folder in found if name and inside not in folder.parents}
    )


def has_gpu() -> bool:
    """Whether the machine has a driver for GPUs of NVIDIA or AMD."""
    return any(
        Path(path).exists()
        for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd")
    )


def cpu_builds(files: Sequence[tuple[str, str]]) -> list[str]:
    """The CPU builds of torch and torchvision in the versions that pip has chosen, where its
    indexes have them: some GB less."""
    found = []
    for name, version in files:
        build = f"{name}=={version.partition('+')[0]}+cpu"
        if name in ("torch", "torchvision") and not version.endswith("+cpu"):
            look = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--no-deps",
                "--ignore-installed",
                "--only-binary",
                ":all:",
                build,
            ]
            found += [build] * (
                subprocess.run(look, check=False, capture_output=True).returncode == 0
            )
    return found


def chosen(
    wanted: Sequence[str],
    packages: Sequence[Locked],
    accepted: Sequence[str],
    folder: Path,
    where: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """Name and version of each package that pip would install, in the versions of constraints.txt.
    Nothing of a package runs.

    where: options of pip for another Python, or another folder
    """
    pins, report = folder / "pins.txt", folder / "report.json"
    pins.write_text(
        "\n".join(locked.requirement for locked in packages if not matches(locked.name, accepted))
    )
    pip(
        "install",
        "--quiet",
        "--dry-run",
        "--report",
        str(report),
        "--only-binary",
        ":all:",
        "-c",
        str(pins),
        *where,
        *wanted,
    )
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return [(canonical(metadata["name"]), metadata["version"]) for metadata in found]


def install_locked(
    wanted: Sequence[str], accepted: Sequence[str] = (), source: Sequence[str] = ()
) -> None:
    """Installs requirements and what they need: each file has a sha256 that constraints.txt lists,
    but for accepted packages."""
    packages = read_lock(LOCK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        files = chosen(wanted, packages, accepted, Path(folder))
        if not has_gpu() and (
            builds := cpu_builds([file for file in files if matches(file[0], accepted)])
        ):
            print("there is no GPU here, so these builds are taken:", *builds, flush=True)
            files = chosen([*wanted, *builds], packages, accepted, Path(folder))
        kinds = [
            "--only-binary",
            ":all:",
            *(word for name in source for word in ("--no-binary", name)),
            "--no-build-isolation",
        ]
        fetch(["install", *kinds], files, packages, accepted, Path(folder))


def fetch(
    command: Sequence[str],
    files: Sequence[tuple[str, str]],
    packages: Sequence[Locked],
    accepted: Sequence[str],
    folder: Path,
) -> None:
    """Has pip install or download files: each one whose sha256 constraints.txt lists, and the
    accepted ones as they are."""
    checked = folder / "requirements.txt"
    checked.write_text(
        "".join(
            hashed(name, version, packages)
            for name, version in files
            if not matches(name, accepted)
        )
    )
    as_it_is = [f"{name}=={version}" for name, version in files if matches(name, accepted)]
    if checked.read_text():
        pip(*command, "--no-deps", "--require-hashes", "-r", str(checked))
    if as_it_is:
        print("not compared with constraints.txt:", *as_it_is, flush=True)
        pip(*command, "--no-deps", *as_it_is)


def fill_wheelhouse(
    folder: Path,
    wanted: Sequence[str],
    accepted: Sequence[str],
    left_out: Sequence[str],
    target: Sequence[str],
) -> None:
    """Wheels of all that an installation takes, of hvdtrain too, and their sha256 in SHA256SUMS.

    left_out: packages that are there already; `torch` stands for all that comes with it. target:
    options of pip for another Python
    """
    packages, left_out = (
        read_lock(LOCK.read_text()),
        [*left_out, *(TORCH if "torch" in left_out else ())],
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        where = ["--ignore-installed", "--target", scratch, *target]
        files = chosen(
            ["pip", "setuptools", "wheel", *wanted], packages, accepted, Path(scratch), where
        )
        kept = [file for file in files if not matches(file[0], left_out)]
        fetch(
            ["download", "--only-binary", ":all:", "--dest", str(folder), *target],
            kept,
            packages,
            accepted,
            Path(scratch),
        )
    pip(
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    )
    wheels = sorted(folder.glob("*.whl"))
    (folder / SUMS).write_text("".join(f"{sha256(wheel)}  {wheel.name}\n" for wheel in wheels))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(
        f"{len(wheels)} wheels, {megabytes:,.0f} MB in {folder}; there: python install.py --from "
        "FOLDER --extras ...",
        flush=True,
    )


def use_wheelhouse(folder: Path) -> None:
    """From here on pip takes wheels of this folder alone. Exits where one is damaged, missing or
    not listed."""
    lines = (folder / SUMS).read_text().splitlines() if (folder / SUMS).is_file() else []
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    wrong = [
        name
        for name, digest in sums.items()
        if not (folder / name).is_file() or sha256(folder / name) != digest
    ]
    unlisted = sorted(path.name for path in folder.glob("*.whl") if path.name not in sums)
    if wrong or unlisted or not sums:
        what = (
            f"missing or damaged: {', '.join(wrong)}"
            if wrong
            else f"there is no {SUMS}"
            if not sums
            else f"not in {SUMS}: {', '.join(unlisted)}"
        )
        sys.exit(
            f"{what}\n  where: {folder}\n  fix: copy the folder again, or fill it anew: make "
            "wheelhouse"
        )
    os.environ |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder.resolve()),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashed(name: str, version: str, packages: Sequence[Locked]) -> str:
    """The requirement of one exact version with its hashes; exits where constraints.txt does not
    have it."""
    known = [
        locked
        for locked in packages
        if locked.name == name and locked.version == version.partition("+")[0]
    ]
    if not known:
        sys.exit(
            f"{name} {version} is not in constraints.txt\n  where: {LOCK}\n  fix: make lock, or "
            f"ACCEPT={name} to install it unchecked"
        )
    return (
        " ".join([f"{name}=={version}", *(f"--hash={digest}" for digest in known[0].hashes)]) + "\n"
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, canonical(pattern)) for pattern in patterns)


def with_torch(
    version: str | None, wanted: Sequence[str], accepted: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What is wanted and accepted with a version of torch, or with the site's. Exits where the site
    has no torch."""
    if version is None:
        return [*wanted], [*accepted]
    without_torchvision = [
        line for line in wanted if canonical(re.split(r"[^\w.-]", line)[0]) != "torchvision"
    ]
    if version != SITE:
        torch = f"torch=={version}"
        look = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--quiet",
            "--ignore-installed",
            "--only-binary",
            ":all:",
        ]
        if (
            len(without_torchvision) < len(wanted)
            and subprocess.run(
                [*look, torch, "torchvision"], check=False, capture_output=True
            ).returncode
        ):
            print(f"torchvision is left out: no release of it fits {torch}", flush=True)
            wanted = without_torchvision
        # some releases of torch want an older one than constraints.txt has
        return [*wanted, torch], [
            *accepted,
            *TORCH,
            "setuptools",
        ]
    there = of_site()
    if "torch" not in there:
        sys.exit(
            f"this Python has no torch of a site's\n  where: {sys.prefix}\n"
            "  fix: python3 -m venv --system-site-packages, in the module or container that has "
            "torch; make TORCH=site does it"
        )
    # torchvision wants one version of torch, so it is not fetched: it is there, or nobody needs it
    return without_torchvision, [*accepted, *there]


def write_lock(uv_arguments: Sequence[str]) -> None:
    """Writes constraints.txt for all extras, every system and every Python; versions stay unless
    the arguments upgrade them."""
    old = {(locked.name, locked.version): locked.hashes for locked in read_lock(LOCK.read_text())}
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "constraints.txt"
        fresh.write_text(LOCK.read_text())  # uv keeps the versions that it finds here
        uv = [
            str(Path(sys.executable).parent / "uv"),
            "pip",
            "compile",
            "--quiet",
            str(ROOT / "setup.cfg"),
            "--all-extras",
        ]
        uv += [
            "--universal",
            "--python-version",
            "3.11",
            "--fork-strategy",
            "fewest",
            "--generate-hashes",
            "--no-annotate",
            "--no-header",
        ]
        if status := subprocess.run(
            [*uv, "-o", str(fresh), *uv_arguments], check=False, stdout=subprocess.DEVNULL
        ).returncode:
            sys.exit(status)
        packages = read_lock(fresh.read_text())
    kept = [
        locked._replace(
            hashes=tuple(sorted({*locked.hashes, *old.get((locked.name, locked.version), ())}))
        )
        for locked in packages
    ]
    LOCK.write_text(lock_text(kept))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python install.py", description=__doc__.partition("\n")[0]
    )
    for name, meaning in (
        ("--extras", "of setup.cfg: horovod mpi test ..."),
        ("--accept", "take what pip's index has, unchecked: torch torchvision 'nvidia-*'"),
        ("--source", "compile from the source archive"),
    ):
        parser.add_argument(name, nargs="*", default=[], metavar="NAME", help=meaning)
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        help=f"another version than constraints.txt has, unchecked; {SITE}: the one that is there",
    )
    parser.add_argument("--packages-only", action="store_true", help="not this clone itself")
    parser.add_argument(
        "--copy", action="store_true", help="install a copy of this clone instead of a link to it"
    )
    parser.add_argument(
        "--lock",
        nargs=argparse.REMAINDER,
        metavar="UV",
        help="write constraints.txt; options of `uv pip compile` may follow",
    )
    parser.add_argument(
        "--wheelhouse",
        type=Path,
        metavar="FOLDER",
        help="install nothing: fill a folder for a machine without a network",
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        metavar="NAME",
        help="with --wheelhouse: what is there already, as torch",
    )
    parser.add_argument("--python", metavar="3.12", help="with --wheelhouse: for this Python")
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="with --wheelhouse: for this platform, as manylinux_2_28_aarch64",
    )
    parser.add_argument(
        "--from", dest="house", type=Path, metavar="FOLDER", help="install from a wheelhouse alone"
    )
    options = parser.parse_args()
    if options.lock is not None:
        write_lock(options.lock)
        return
    if options.house is not None:
        use_wheelhouse(options.house)
    wanted, accepted = with_torch(options.torch, requirements(options.extras), options.accept)
    if options.wheelhouse is not None:
        target = [
            *(["--python-version", options.python] if options.python else []),
            *(["--platform", options.platform] if options.platform else []),
        ]
        fill_wheelhouse(options.wheelhouse, wanted, accepted, options.without, target)
        return
    # those of a site stay as they are: its torch may want an older setuptools
    install_locked(
        ["pip", "setuptools", "wheel", *(["cython"] if options.source else [])],
        accepted if options.torch == SITE else (),
    )
    install_locked(wanted, accepted, options.source)
    for horovod in (
        options.house.glob("horovod-*.whl")
        if options.house is not None and "horovod" in options.extras
        else ()
    ):
        pip("install", "--no-deps", str(horovod))
    if not options.packages_only:
        pip(
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            *([] if options.copy else ["-e"]),
            str(ROOT),
        )


if __name__ == "__main__":
    main()
