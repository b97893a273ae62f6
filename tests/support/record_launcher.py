"""Records what a launcher sets in its processes: LAUNCHER ... python tests/support/record_launcher.py FOLDER, then --merge FOLDER OUT.json.

mpirun -np 4 -H n1:2,n2:2 python tests/support/record_launcher.py /shared/folder
python tests/support/record_launcher.py --merge /shared/folder tests/support/launchers/NAME.json "Open MPI 5" "mpirun ..."

A recorded launcher is a row of test_placement.py. Paths, users and long values are not kept; nor is anything but launchers' variables.
Needs nothing but Python, so that it runs in any environment.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

KEPT = re.compile(
    r"(?!I_MPI_INFO|HYDRA_BSTRAP_DOWN)(OMPI_|PMIX_|PMI_|PRTE_|MPI_|MPIR_|HYDRA|HYDI_|I_MPI_|SLURM_|SLURMD_|TORCHELASTIC_|GROUP_|ROLE_|LOCAL_|MASTER_|HOROVOD_|PALS_|FLUX_|JSM_|SUBMITIT_LOCAL_)"
    r"|(RANK|WORLD_SIZE|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES)$"
)
SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|CRED|USER|UID|GID|GECOS|HOME|SUBMIT_|CONF|URI|NAMESPACE|ARGV|COMMAND",
    re.IGNORECASE,
)
LONGEST = 80


def record(folder: Path) -> None:
    """One file for this process."""
    folder.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    recorded = {
        "host": host,
        "environ": {
            key: neutral(key, value) for key, value in sorted(os.environ.items()) if KEPT.match(key)
        },
    }
    (folder / f"{host}-{os.getpid()}.json").write_text(json.dumps(recorded), encoding="utf-8")


def neutral(key: str, value: str) -> str:
    """A value without secrets, addresses and paths."""
    if SECRET.search(key) or len(value) > LONGEST:
        return "..."
    value = re.sub(r"\d+\.\d+\.\d+\.\d+", "127.0.0.1", value)
    return re.sub(r"(?<![\w.])/[\w.@~/+-]+", "/path", value)


def merge(folder: Path, out: Path, version: str, command: str) -> None:
    """Writes one file for the launcher: the variables that are equal in all processes, then each
    process's other variables, in rank order."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hvdtrain.comm.launcher_variables import placement

    recorded = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    ]
    places = [placement(one["environ"]) for one in recorded]
    recorded = [
        one
        for _, one in sorted(
            zip(places, recorded, strict=True), key=lambda pair: (pair[0].rank, pair[1]["host"])
        )
    ]
    places.sort(key=lambda place: place.rank)
    hosts = list(dict.fromkeys(one["host"] for one in recorded))
    alike = {
        key: value
        for key, value in recorded[0]["environ"].items()
        if all(one["environ"].get(key) == value for one in recorded)
    }
    processes = [
        {
            "host": f"h{hosts.index(one['host'])}",
            "place": [place.rank, place.size, place.local_rank, place.local_size],
            "environ": {
                key: _rename(value, hosts)
                for key, value in one["environ"].items()
                if key not in alike
            },
        }
        for one, place in zip(recorded, places, strict=True)
    ]
    whole = {
        "version": version,
        "command": command,
        "launcher": places[0].launcher,
        "environ": {key: _rename(value, hosts) for key, value in alike.items()},
        "processes": processes,
    }
    text = re.sub(
        r"\[\s+(\d+),\s+(\d+),\s+(\d+),\s+(\d+)\s+\]",
        r"[\1, \2, \3, \4]",
        json.dumps(whole, indent=1),
    )
    out.write_text(f"{text}\n", encoding="utf-8")
    print(f"{out}: {places[0].launcher}: {[(one['host'], one['place']) for one in processes]}")


def _rename(text: str, hosts: list[str]) -> str:
    for number, host in enumerate(hosts):
        text = re.sub(rf"\b{re.escape(host)}\b", f"h{number}", text)
    return text


if __name__ == "__main__":
    if sys.argv[1:2] == ["--merge"]:
        merge(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        record(Path(sys.argv[1]))
