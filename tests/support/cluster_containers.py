"""Containers as on a cluster: images by buildah from a base image of our own, podman, and the real
apptainer; no registry."""

from __future__ import annotations

import ast
import functools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cluster_packages import need
from filelock import FileLock
from ranks import HANG_S, ROOT, Result, environment

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain-cluster"
HOROVOD = CACHE.parent / "hvdtrain"  # Horovod's wheels
# for an image with all that it is made of: minutes on an idle machine with a fast network
BUILT_S = 7200.0
# layers of an image and its predecessors; beyond that the image is rebuilt from scratch
LAYERS = 60
BASE = "docker.io/library/debian:bookworm-slim"

_STORAGE = """[storage]
driver = "overlay"
graphroot = "{cache}/images"
runroot = "{cache}/running"
"""
# runc and the small ulimits: for machines without systemd that may not raise limits.
_CONTAINERS = """[containers]
netns = "host"
utsns = "host"
userns = "host"
cgroups = "enabled"
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
"""
# bookworm has no apptainer, so sid's apptainer runs from sid's root directory, in a separate mount
# namespace. A new root, not chroot: apptainer changes the propagation of "/", which must be a
# mount. The machine's home, /tmp, /dev/shm and names of hosts are seen there.
_APPTAINER = """#!/bin/bash
set -eu
if [ -z "${HVDTRAIN_APPTAINER:-}" ]; then HVDTRAIN_APPTAINER=1 exec unshare -m --propagation private "$0" "$@"; fi
unset HVDTRAIN_APPTAINER
export APPTAINER_NO_PRIVS=1
root=ROOT here=$PWD
mount --bind "$root" "$root"
for file in /etc/hosts /etc/resolv.conf /etc/passwd /etc/group; do mount --bind "$file" "$root$file"; done
for folder in /proc /sys /dev /tmp /run /root /home BINDS; do
    if [ -d "$folder" ]; then mkdir -p "$root$folder"; mount --rbind "$folder" "$root$folder"; fi
done
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$here"
umount -l /.old
exec /usr/bin/apptainer "$@"
"""  # noqa: E501


def run(command: Sequence[str | Path], *, timeout_s: float = HANG_S, cwd: Path = ROOT) -> Result:
    """A command to its end, in the environment of these containers; 124 is the status of one that
    ran past timeout_s."""
    began = time.monotonic()
    words = ["timeout", "-k", "5", str(timeout_s), *map(str, command)]
    # runs the image's code, also if this folder is visible inside
    env = environment({**settings(), "PYTHONPATH": ""})
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=env,
        check=False,
    )
    return Result(ran.returncode, ran.stdout, ran.stderr, time.monotonic() - began)


def must(command: Sequence[str | Path], *, timeout_s: float = HANG_S) -> str:
    """What a command says that must not fail."""
    ran = run(command, timeout_s=timeout_s)
    assert ran.returncode == 0, (
        f"{shlex.join(map(str, command))}: {ran.returncode} after {ran.seconds:.0f} "
        f"s\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    )
    return ran.stdout


@functools.cache
def settings() -> dict[str, str]:
    """The environment variables of buildah and podman: storage of our own, no daemon, no
    registry."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "storage.conf").write_text(_STORAGE.format(cache=CACHE))
    (CACHE / "containers.conf").write_text(_CONTAINERS)
    conf = {
        "CONTAINERS_STORAGE_CONF": str(CACHE / "storage.conf"),
        "CONTAINERS_CONF": str(CACHE / "containers.conf"),
    }
    return {**conf, "BUILDAH_ISOLATION": "chroot"}


def need_podman() -> None:
    """Skips the test, with the reason, if images cannot be built."""
    if os.geteuid():
        pytest.skip(
            "needs root: a base image is made by mmdebstrap, and apptainer runs from a root "
            "directory of its own"
        )
    need("buildah", "podman", "runc", "mmdebstrap")


@functools.cache
def image(target: str) -> str:
    """Returns the name of the image that the Containerfile builds for a target; unchanged layers
    come from the previous run.

    The first image on a machine keeps no layers: on a machine that is used once, writing 2.7 GB of
    layers would take too long.
    """
    need_podman()
    name = f"localhost/hvdtrain-{target}"
    # not built twice
    below = (
        []
        if target == "runtime"
        else ["--build-context", f"runtime=container-image://{image('runtime')}"]
    )
    HOROVOD.mkdir(parents=True, exist_ok=True)
    _base_image()
    with FileLock(CACHE / "images.lock"):
        pip = _pip_mounts()
        again = run(["podman", "image", "exists", name]).returncode == 0
        words = [
            f"--layers={str(again).lower()}",
            "--pull-never",
            "--network=host",
            *(f"--volume={mount}" for mount in (*pip, f"{HOROVOD}:/root/.cache/hvdtrain")),
        ]
        # A machine with its own pip settings gets torch from where these say.
        arguments = [f"--build-arg=BASE={BASE}", *(["--build-arg=TORCH_INDEX="] if pip else [])]
        must(
            ["buildah", "bud", *words, *below, *arguments, "--target", target, "-t", name, ROOT],
            timeout_s=BUILT_S,
        )
    return name


@functools.cache
def _base_image() -> None:
    """Creates an image like debian:bookworm-slim from Debian's archive, unless it exists. First
    removes all images if there are too many."""
    with FileLock(CACHE / "images.lock"):
        if len(must(["buildah", "images", "--all", "--quiet"]).split()) > LAYERS:
            must(["buildah", "rmi", "--all", "--force"])
        if run(["podman", "image", "exists", BASE]).returncode:
            tar = CACHE / "base.tar"
            # debian:bookworm-slim has dpkg not wait for the disk either
            options = [
                "--variant=apt",
                "--mode=root",
                "--aptopt=Acquire::Languages none",
                "--dpkgopt=force-unsafe-io",
            ]
            words = ["--quiet", *options, "bookworm", tar]
            must(["mmdebstrap", *words], timeout_s=BUILT_S)
            must(["podman", "import", "--quiet", "--change", "CMD bash", tar, BASE])
            tar.unlink()


def _pip_mounts() -> list[str]:
    """This machine's own pip settings as bind mounts for a build: nothing of them is written into
    an image."""
    options: dict[str, str] = {}
    for line in must([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        # variables come after the files, and win
        options[key.rpartition(".")[2].removeprefix("default-")] = str(ast.literal_eval(value))
    kept = {
        key: value
        for key, value in options.items()
        if key in ("index-url", "extra-index-url", "find-links", "proxy", "timeout")
    }
    mounts = {
        f"{folder}:{folder}:ro"
        for value in kept.values()
        for word in value.split()
        if (folder := _folder(word))
    }
    if certificates := options.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE"):
        shutil.copy(certificates, CACHE / "pip-cert.pem")
        kept["cert"] = "/run/pip-cert.pem"
        mounts.add(f"{CACHE / 'pip-cert.pem'}:/run/pip-cert.pem:ro")
    if not kept:
        return []
    (CACHE / "pip.conf").write_text(
        "\n".join(["[global]", *(f"{key} = {value}" for key, value in kept.items())]) + "\n"
    )
    return [f"{CACHE / 'pip.conf'}:/etc/pip.conf:ro", *sorted(mounts)]


def _folder(word: str) -> str | None:
    """Returns the folder on this machine that a location of packages names; for an index its
    parent, because the index's pages link to files beside it."""
    path = unquote(urlsplit(word).path) if word.startswith("file:") else word
    if not path.startswith("/") or not Path(path).exists():
        return None
    return str(Path(path).parent) if Path(path).name == "simple" else path


@functools.cache
def apptainer() -> Path:
    """The real apptainer: this machine's, or a wrapper that runs Debian sid's."""
    if found := shutil.which("apptainer"):
        return Path(found)
    need_podman()
    root = CACHE / "apptainer-root"
    program = CACHE / "bin" / "apptainer"
    with FileLock(CACHE / "apptainer.lock"):
        if not (root / "usr/bin/apptainer").exists():
            _sid(root)
        program.parent.mkdir(exist_ok=True)
        # Folders of the test run, if a site keeps them elsewhere than under /tmp and /root.
        binds = " ".join(
            sorted(
                {
                    str(Path(path))
                    for path in (f"/{ROOT.parts[1]}", f"/{Path(sys.prefix).resolve().parts[1]}")
                }
            )
        )
        program.write_text(
            _APPTAINER.replace("ROOT", shlex.quote(str(root))).replace("BINDS", binds)
        )
        program.chmod(0o755)
    return program


def _sid(root: Path) -> None:
    """Creates a root directory with Debian sid's apptainer; skips the test if the archive does not
    provide it."""
    shutil.rmtree(root, ignore_errors=True)
    fresh = root.with_suffix(".fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    # a mirror may be behind
    unchecked = [
        "--aptopt=Acquire::Check-Valid-Until false",
        "--aptopt=Acquire::Check-Date false",
    ]
    words = [
        "--quiet",
        "--variant=apt",
        "--mode=root",
        *unchecked,
        "--include=apptainer,ca-certificates,mount",
    ]
    ran = run(["mmdebstrap", *words, "sid", fresh], timeout_s=BUILT_S)
    if ran.returncode:
        pytest.skip(
            f"mmdebstrap could not get apptainer from Debian sid: {ran.stderr.strip()[-500:]}"
        )
    for name in ("localtime", "hosts", "resolv.conf"):  # mount points for the host's files
        (fresh / "etc" / name).touch()
    fresh.rename(root)


# In a separate mount namespace: bind mounts disappear when the command ends.
_DEBIAN_13 = """
set -eu
for folder in /proc /sys /dev; do mount --rbind "$folder" "ROOT$folder"; done
for mount in MOUNTS; do
    IFS=: read -r from to _ <<<"$mount"
    if [ -d "$from" ]; then mkdir -p "ROOT$to"; else mkdir -p "ROOT${to%/*}" && touch "ROOT$to"; fi
    mount --bind "$from" "ROOT$to"
done
exec chroot ROOT /usr/bin/env -i HOME=/root PATH=/usr/bin:/bin "$@"
"""


def debian_13(command: Sequence[str | Path], *, timeout_s: float = HANG_S) -> Result:
    """Runs a command as root of a Debian 13 with Python, make and a compiler, whose folder /src has
    the files of this clone.

    The folder outlives the tests: the next one finds the environment that `make` has made in it,
    and the machine's wheels of Horovod.
    """
    need_podman()
    root = CACHE / "debian-13"
    with FileLock(CACHE / "debian-13.lock"):
        if not (root / "usr/bin/python3").exists():
            fresh = root.with_suffix(".fresh")
            shutil.rmtree(fresh, ignore_errors=True)
            words = ["--quiet", "--variant=apt", "--mode=root", "--aptopt=Acquire::Languages none"]
            must(
                [
                    "mmdebstrap",
                    *words,
                    "--include=python3-venv,python3-dev,g++,make,ca-certificates",
                    "trixie",
                    fresh,
                ],
                timeout_s=BUILT_S,
            )
            for name in ("hosts", "resolv.conf"):
                (fresh / "etc" / name).touch()
            fresh.rename(root)
        for name in must(["git", "-C", ROOT, "ls-files", "-z"]).split("\0"):
            if name and (ROOT / name).is_file():
                (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / "src" / name)
        HOROVOD.mkdir(parents=True, exist_ok=True)
        mounts = [
            *_pip_mounts(),
            f"{HOROVOD}:/root/.cache/hvdtrain",
            *(f"/etc/{name}:/etc/{name}" for name in ("hosts", "resolv.conf")),
        ]
        script = _DEBIAN_13.replace("ROOT", shlex.quote(str(root))).replace(
            "MOUNTS", shlex.join(mounts)
        )
        return run(
            ["unshare", "-m", "--propagation", "private", "bash", "-c", script, "bash", *command],
            timeout_s=timeout_s,
        )


@functools.cache
def sif(target: str) -> Path:
    """Returns the image as one file for apptainer, built by jobs/hvdtrain.def; rebuilt if the image
    has changed."""
    name = image(target)
    program = apptainer()
    identity = must(["podman", "image", "inspect", "--format", "{{.Id}}", name]).strip()
    path = CACHE / f"hvdtrain-{target}-{identity[:12]}.sif"
    with FileLock(CACHE / "sif.lock"):
        if not path.exists():
            for old in CACHE.glob(f"hvdtrain-{target}-*.sif"):
                old.unlink()
            archive = CACHE / "archive.tar"
            fresh = path.with_suffix(".fresh")
            # of a run that was ended; buildah does not write over it
            archive.unlink(missing_ok=True)
            must(["buildah", "push", name, f"docker-archive:{archive}:hvdtrain:latest"])
            fast = ["--force", "--mksquashfs-args", "-comp lz4"]
            must(
                [
                    program,
                    "build",
                    *fast,
                    "--build-arg",
                    f"ARCHIVE={archive}",
                    fresh,
                    ROOT / "jobs/hvdtrain.def",
                ],
                timeout_s=BUILT_S,
            )
            archive.unlink()
            fresh.rename(path)
    return path
