"""Everything in a process that determines its results, apart from data and configuration: versions,
hvdtrain's code, environment variables."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

from hvdtrain.config.plugins import PACKAGE
from hvdtrain.version import __version__

PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "Horovod": "horovod",
    "mpi4py": "mpi4py",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "Keras": "keras",
}
PACKAGES |= {"TensorFlow": "tensorflow", "TensorFlow (CPU)": "tensorflow-cpu"}
_LIBRARIES_OF_JAX = {"optax": "optax", "flax": "flax", "equinox": "equinox", "Haiku": "dm-haiku"}
PACKAGES |= _LIBRARIES_OF_JAX
USED_BY = {  # framework or engine -> names of PACKAGES
    **{
        "torch": ("torch",),
        "jax": ("jax", "jaxlib", *_LIBRARIES_OF_JAX),
        "numpy": (),
        "single": (),
        "keras": ("Keras", "torch", "jax", "jaxlib", "TensorFlow", "TensorFlow (CPU)"),
    },
    **{"mpi": ("mpi4py",), "horovod": ("torch", "Horovod"), "torchdist": ("torch",)},
}
# Variables that change results. Variables that may differ between hosts (threads, devices, network
# interfaces) are not among them.
VARIABLES = (
    *("KERAS_BACKEND", "PYTHONHASHSEED", "PYTHONOPTIMIZE"),
    *(
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "ATEN_CPU_CAPABILITY",
    ),
    *(
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "DNNL_MAX_CPU_ISA",
        "OPENBLAS_CORETYPE",
    ),
    *(
        "XLA_FLAGS",
        "JAX_ENABLE_X64",
        "JAX_DEFAULT_MATMUL_PRECISION",
        "JAX_DEFAULT_PRNG_IMPL",
        "JAX_THREEFRY_PARTITIONABLE",
    ),
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
    ),
)
FIXES = {  # kind of difference between ranks -> what to do
    "versions": "install the same environment (or use the same container image) on every host",
    "code": "use one installation that all hosts see, or the same one on each; look for "
    "PYTHONPATH and for outdated containers",
    "objects": "give every rank's hvdtrain.train() the same objects: they must not be made of the "
    "rank, a clock or a random number",
    "environment": "give every rank the same value, or none: mpirun -x NAME, srun --export",
    "data": "copy the same data to every host, or give data.root= of a shared folder",
    "configuration": "give every rank the same command and the same --config file",
}
_SEED = "SEED"  # a variable with this suffix is compared, too: the user's code may read it


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns name -> version of Python, hvdtrain and these packages, names of PACKAGES; packages
    that are not installed are skipped."""
    by_program = {"hvdtrain": __version__, "Python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_program[name] = metadata.version(PACKAGES[name])
    return by_program


def code_digests() -> dict[str, str]:
    """Returns file -> digest, of hvdtrain's own code."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        str(path.relative_to(PACKAGE)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in files
    }


def digest(items: Mapping[str, str]) -> str:
    """Returns a short digest of names and values, independent of their order."""
    return hashlib.sha256(repr(sorted(items.items())).encode()).hexdigest()[:12]


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that change results and are set."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in VARIABLES or name.upper().endswith(_SEED)
    }
