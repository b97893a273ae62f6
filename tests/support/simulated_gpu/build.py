"""Compiles the simulated GPU once for each version of its source and of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "kernels.cpp")
# not optimized: the work is done by torch's kernels, and the compiler takes a third of the time
FLAGS = ("-O0", "-g0", "-std=c++20", "-fPIC", "-w")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hvdtrain-tests")


def compiler() -> str | None:
    """The C++ compiler's path; None if there is none."""
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def torch_folder() -> Path:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin, "torch is not installed"
    return Path(spec.origin).parent


def library() -> Path:
    """The compiled library, from the cache if it is there. Several processes may call it."""
    sources = [(HERE / name).read_bytes() for name in (*SOURCES, "gpu.h")]
    key = hashlib.sha256(b"\0".join([*sources, version("torch").encode(), *map(str.encode, FLAGS)]))
    built = CACHE / f"simulated-gpu-{key.hexdigest()[:16]}.so"
    if not built.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _build(Path(folder, built.name)).replace(built)
    return built


def _build(result: Path) -> Path:
    torch = torch_folder()
    program = compiler()
    assert program, "no C++ compiler"
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]

    def compiled(source: str) -> str:
        target = result.with_name(f"{source}.o")
        _run(program, *FLAGS, *include, "-c", str(HERE / source), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor(len(SOURCES)) as threads:
        objects = list(threads.map(compiled, SOURCES))
    links = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
    _run(program, "-shared", *objects, *links, "-o", str(result))
    return result


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr[-4000:]}"
