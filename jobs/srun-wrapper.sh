#!/bin/bash
# Runs between srun and each rank: gives the rank a GPU and cores of its own where SLURM did not, and starts the container.
#   srun --mpi="$(jobs/srun-wrapper.sh --pmi)" jobs/srun-wrapper.sh python3 -m hvdtrain key=value ...
# PYTHON: the interpreter whose MPI --pmi looks at. CONTAINER=image.sif: started by apptainer or singularity; APPTAINER_BIND adds folders.
set -Eeuo pipefail
trap 'echo "srun-wrapper.sh: failed on $(hostname), line $LINENO: $BASH_COMMAND" >&2' ERR

# Prints what is wrong, and ends.
refuse() {
    echo "srun-wrapper.sh: $1" >&2
    exit 2
}

container=()
if [[ -n ${CONTAINER:-} ]]; then
    runtime=$(command -v apptainer || command -v singularity || true)
    [[ -n $runtime ]] || refuse "CONTAINER=$CONTAINER, but $(hostname) has neither apptainer nor singularity"
    [[ -r $CONTAINER ]] || refuse "no image $CONTAINER on $(hostname)"
    container=("$runtime" exec --pwd "$PWD")
    [[ ! -e /dev/nvidiactl ]] || container+=(--nv)
    container+=("$CONTAINER")
fi

# Prints the value of srun's --mpi= for the MPI of mpi4py. With another value srun starts N jobs of one rank, or none.
pick_pmi() {
    local listed library wanted python=${PYTHON:-python3}
    listed=$(srun --mpi=list 2>&1) || refuse "srun --mpi=list failed on $(hostname), which must be a node of SLURM: $listed"
    library=$("${container[@]}" "$python" -c '
import sys
try:
    import mpi4py
    mpi4py.rc(initialize=False)
    from mpi4py import MPI
    print(MPI.Get_library_version().replace("\0", "").splitlines()[0])
except (ImportError, RuntimeError) as error:  # comm.engine=torchdist needs no MPI
    print(f"srun-wrapper.sh: no MPI in {sys.executable} ({error}), so --mpi=none, for comm.engine=torchdist", file=sys.stderr)
') || refuse "${container[*]} $python does not run on $(hostname): set PYTHON= to that of the environment with hvdtrain"
    case $library in
        "") wanted=none ;;
        *"Open MPI"*) wanted=pmix ;;
        *) wanted=pmi2 ;; # MPICH, Intel MPI
    esac
    grep -qw "$wanted" <<<"$listed" ||
        refuse "$library needs srun --mpi=$wanted, which this SLURM lacks; use mpirun in the job, or PMI=..."
    echo "$wanted"
}

# One GPU for this rank, where each rank of the node sees several. With --gpus-per-task or --gpu-bind srun has already assigned one.
# CUDA numbers the GPUs that it sees from 0: a container may have /dev/nvidia4 and nvidia5 alone. SRUN_WRAPPER_DEV: another /dev, for tests.
pin_gpu() {
    local -a gpus files
    mapfile -t files < <(compgen -G "${SRUN_WRAPPER_DEV:-/dev}/nvidia[0-9]*" || true)
    local all=${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((${#files[@]} - 1)))}
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
[[ $# -gt 0 ]] || refuse "no program to run, as in: srun --mpi=pmix jobs/srun-wrapper.sh python3 -m hvdtrain key=value ..."
if [[ -n ${SLURM_LOCALID:-} ]]; then
    pin_gpu
    pin_cores
fi
exec "${container[@]}" "$@" # exec: SLURM's signals reach the rank itself
