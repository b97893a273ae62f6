"""Which environment variables ranks on other hosts receive."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdtrain.errors import UserError, short
from hvdtrain.training.replicas.software import variables

# Environment variables for ranks on other hosts, unless their name looks like a secret.
_FORWARDED_NAMES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_FORWARDED_PREFIXES = (
    *("HVDTRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "JAX_", "XLA_", "MPI4PY_"),
    *("OMP_", "MKL_", "KMP_", "UCX_", "FI_", "I_MPI_", "MPICH_", "PYTHON"),
)
_SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")


def forwarded_variables(environ: Mapping[str, str], requested: Sequence[str]) -> tuple[str, ...]:
    """Returns names of the variables that ranks on other hosts need, and of those that the user
    requests. Raises UserError."""
    for name in requested:
        if name not in environ:
            what = f"--env {short(name)}: this variable is not set"
            raise UserError(
                what,
                "command line of launch",
                "give the name alone, and set it before: export NAME=VALUE",
            )
    compared = variables(environ)  # ranks with different values of these are rejected
    forwarded = {
        name
        for name in environ
        if name in _FORWARDED_NAMES
        or ((name in compared or name.startswith(_FORWARDED_PREFIXES)) and not _SECRET.search(name))
    }
    return tuple(sorted({*forwarded, *requested}))
