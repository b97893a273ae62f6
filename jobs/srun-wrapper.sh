#!/bin/bash
# Runs between srun and each rank: gives the rank a GPU and cores of its own where SLURM did not, and starts the container.
#   srun --mpi="$(jobs/srun-wrapper.sh --pmi)" jobs/srun-wrapper.sh python3 -m hvdtrain key=value ...
# PYTHON: the interpreter whose MPI --pmi looks at. CONTAINER=image.sif: started by apptainer or singularity; APPTAINER_BIND adds folders.
set -euo pipefail

container=()
if [[ -n ${CONTAINER:-} ]]; then
    runtime=$(command -v apptainer || command -v singularity) || {
        echo "srun-wrapper.sh: CONTAINER=$CONTAINER, but $(hostname) has neither apptainer nor singularity" >&2
        exit 2
    }
    container=("$runtime" exec --pwd "$PWD")
    [[ ! -e /dev/nvidiactl ]] || container+=(--nv)
    container+=("$CONTAINER")
fi

# Prints the value of srun's --mpi= for the MPI of mpi4py. With another value srun starts N jobs of one rank, or none.
pick_pmi() {
    local listed library wanted
    listed=$(srun --mpi=list 2>&1)
    library=$("${container[@]}" "${PYTHON:-python3}" -c '
import mpi4py
mpi4py.rc(initialize=False)
from mpi4py import MPI
print(MPI.Get_library_version().replace("\0", "").splitlines()[0])' 2>/dev/null) || library="" # no MPI: comm.engine=torchdist needs none
    case $library in
        "") wanted=none ;;
        *"Open MPI"*) wanted=pmix ;;
        *) wanted=pmi2 ;; # MPICH, Intel MPI
    esac
    if ! grep -qw "$wanted" <<<"$listed"; then
        echo "srun-wrapper.sh: $library needs srun --mpi=$wanted, which this SLURM lacks; use mpirun in the job, or PMI=..." >&2
        exit 2
    fi
    echo "$wanted"
}

# One GPU for this rank, where each rank of the node sees several. With --gpus-per-task or --gpu-bind srun has already assigned one.
pin_gpu() {
    local -a gpus
    local all=${CUDA_VISIBLE_DEVICES-$(compgen -G '/dev/nvidia[0-9]*' | tr -dc '0-9\n' | sort -n | paste -sd,)}
    [[ -z ${SLURM_GPUS_PER_TASK:-} ]] || return 0
    IFS=, read -ra gpus <<<"$all"
    ((${#gpus[@]} <= 1)) || export CUDA_VISIBLE_DEVICES=${gpus[SLURM_LOCALID % ${#gpus[@]}]}
}

# Prints the cores of this process, one per line.
cores() {
    local part
    for part in $(sed -n 's/^Cpus_allowed_list:\s*//p' /proc/self/status | tr ',' ' '); do
        seq "${part%-*}" "${part#*-}"
    done
}

# Pins this rank to an equal share of the node's cores, where SLURM does not pin and the job has the whole node: otherwise the cores could be those
# of another job's ranks.
pin_cores() {
    local -a mine
    local tasks=${SLURM_STEP_TASKS_PER_NODE:-1} share
    tasks=${tasks%%[(,]*} # of the first node, which has the most
    mapfile -t mine < <(cores)
    share=$((${#mine[@]} / tasks))
    if [[ -z ${SLURM_CPU_BIND_TYPE:-} && ${SLURM_CPUS_ON_NODE:-0} -eq ${#mine[@]} && $share -ge 1 && $tasks -gt 1 ]]; then
        taskset -cp "$(IFS=,; echo "${mine[*]:SLURM_LOCALID * share:share}")" $$ >/dev/null
    fi
}

if [[ ${1:-} == --pmi ]]; then
    pick_pmi
    exit
fi
if [[ -n ${SLURM_LOCALID:-} ]]; then
    pin_gpu
    pin_cores
fi
exec "${container[@]}" "$@" # exec: SLURM's signals reach the rank itself
