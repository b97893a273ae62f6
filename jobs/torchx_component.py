"""hvdtrain as a component of torchx: torchrun starts the ranks on each node, on whatever scheduler torchx has.

torchx run -s slurm jobs/torchx_component.py:train -j 2x4 -- run=/shared/run --config /shared/job.yaml key=value ...
torchx run -s local_cwd jobs/torchx_component.py:train -j 1x2 --script train.py -- ARGUMENTS   # your own script

Each replica is a node with an environment that has hvdtrain: a virtual environment (local_cwd, slurm) or an image (docker, kubernetes).
--max_retries 10 starts a job again that stopped before its end or lost a node; run=DIR resumes it.
"""  # noqa: E501

import secrets
from typing import Dict, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist


def train(
    *arguments: str,
    script: Optional[str] = None,  # noqa: UP045 (torchx knows these spellings of types alone)
    j: str = "1x2",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # torchx's own name
    image: str = "",
    name: str = "/",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
) -> specs.AppDef:
    """Trains with hvdtrain, or runs a script of your own, on NODESxRANKS ranks

    Args:
        arguments: key=value ... and options of hvdtrain, or the arguments of the script
        script: a script that calls hvdtrain; default: hvdtrain itself
        j: nodes x ranks on each, as 2x4
        h: a named resource for each node; or cpu, gpu and memMB
        cpu: cores of each node
        gpu: GPUs of each node
        memMB: memory of each node, in MB
        image: with hvdtrain in it, where the scheduler starts containers; the folder of the job
        with local_cwd name: of the job env: further variables, as OMP_NUM_THREADS=4 max_retries:
        how often the scheduler starts the job again
    """
    variables = {
        "HVDTRAIN_SECRET": secrets.token_hex(
            16
        ),  # ranks sign with it what they send each other (docs/clusters.md)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a store for each start of the ranks
        **(env or {}),
    }
    return dist.ddp(
        *arguments,
        script=script,
        m=None if script else "hvdtrain",
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=variables,
        max_retries=max_retries,
    )
