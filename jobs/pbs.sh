#!/bin/bash
# hvdtrain on PBS (OpenPBS, PBS Pro, Torque), from the folder that contains jobs/. qsub passes no arguments to the job, so ARGUMENTS has them:
#   ARGUMENTS="--config configs/cifar10.yaml data.root=/scratch/data" MAX_TIME=3.9h qsub -v ARGUMENTS,MAX_TIME -l walltime=4:00:00 jobs/pbs.sh
#   ARGUMENTS="train.py ARGUMENTS" qsub -v ARGUMENTS jobs/pbs.sh              # your own script; $RUN is the folder of its run
#   ARGUMENTS="train.py ARGUMENTS" bash jobs/pbs.sh --dry-run                 # checks them before the queue; also python train.py, -m pkg.train
# Before MAX_TIME is over, and after `qsig -s USR2 JOB`, it writes a checkpoint and submits itself again. `qdel` ends it without a checkpoint.
# This script does not see the options of qsub: for the next submission, write them in QSUB too (QSUB="-q long -l walltime=4:00:00"), or below.
#PBS -N hvdtrain
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=04:00:00
#PBS -j oe
# ---- your site: remove the first # of the lines that it needs, and write its names ------------------
##PBS -A NAME
##PBS -q NAME
#module load openmpi                         # the MPI that mpi4py was built with
#source /shared/venv/bin/activate            # a folder that every node sees; or PYTHON=/shared/venv/bin/python
# -----------------------------------------------------------------------------------------------------
set -euo pipefail

if [[ ${1:-} == --dry-run ]]; then
    PBS_JOBID=${PBS_JOBID:-N} PBS_NODEFILE=${PBS_NODEFILE:-NODES}
fi
if [[ -z ${PBS_JOBID:-} || -z ${PBS_NODEFILE:-} ]]; then
    echo "pbs.sh: this is no PBS job: PBS_JOBID or PBS_NODEFILE is not set" >&2
    echo "  fix: ARGUMENTS='key=value ...' qsub -v ARGUMENTS jobs/pbs.sh; without PBS: hvdtrain launch -np 4 -- key=value ..." >&2
    exit 2
fi
cd "${PBS_O_WORKDIR:-.}"

PYTHON=${PYTHON:-python3}                   # of the environment with hvdtrain, on every node
RUN=${RUN:-runs/pbs-${PBS_JOBID%%.*}}       # a folder that the first node sees; the next submission resumes the job in it
MAX_TIME=${MAX_TIME:-}                      # a little less than the walltime, which a PBS job cannot ask for
RESTARTS=${RESTARTS:-50}                    # that remain
CONTAINER=${CONTAINER:-}                    # an image; the ranks run inside it
ARGUMENTS=${ARGUMENTS:-}                    # of hvdtrain; an argument cannot contain a space
QSUB=${QSUB:-}                              # qsub's options for the next submission
export PYTHON RUN MAX_TIME RESTARTS CONTAINER ARGUMENTS QSUB

# Open MPI notices a dead node after time + probes x intvl seconds; without these settings after 8 minutes, or when TCP does.
export PRTE_MCA_oob_tcp_keepalive_time=${PRTE_MCA_oob_tcp_keepalive_time:-30}
export PRTE_MCA_oob_tcp_keepalive_intvl=${PRTE_MCA_oob_tcp_keepalive_intvl:-10}
export PRTE_MCA_oob_tcp_keepalive_probes=${PRTE_MCA_oob_tcp_keepalive_probes:-3}

read -ra arguments <<<"$ARGUMENTS" || true
read -ra options <<<"$QSUB" || true
is_dry=
[[ ${1:-} != --dry-run ]] || { is_dry=yes && shift; }
arguments+=("$@")
if [[ ! -r jobs/job-words.sh ]]; then
    echo "pbs.sh: no jobs/job-words.sh in $PWD; submit from the folder that contains jobs/" >&2
    exit 2
fi
source jobs/job-words.sh
read_words pbs.sh "${arguments[@]}"
check_words
for argument in "${arguments[@]}"; do
    if [[ -n $is_hvdtrain && $argument == run=* ]]; then
        echo "pbs.sh: the run folder is RUN=${argument#run=}, not an argument in ARGUMENTS" >&2
        exit 2
    fi
done
if [[ -z $is_hvdtrain && -n $MAX_TIME ]]; then
    echo "pbs.sh: MAX_TIME=$MAX_TIME is for key=value jobs, not for ${arguments[0]}; a custom loop has guard.max_time=$MAX_TIME" >&2
    exit 2
fi
[[ -z $MAX_TIME ]] || words+=(--max-time "$MAX_TIME")
start=("$PYTHON" -m hvdtrain launch --hostfile "$PBS_NODEFILE" ${CONTAINER:+--container "$CONTAINER"} -- "${words[@]}")
[[ -z $is_dry ]] || dry_run "${start[@]}"
"${start[@]}" &
launcher=$!
trap 'kill -USR2 "$launcher" 2>/dev/null || true' USR1 USR2 TERM # launch passes it on to the ranks
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a trapped signal ends `wait`, not the launcher
    code=0
    wait "$launcher" || code=$?
done

if [[ -n $is_hvdtrain ]] && ((code == 0)) && ! tail -n 1 "$RUN/events.jsonl" | grep -q '"kind": "end"'; then
    echo "pbs.sh: the launcher ended with 0, but the job did not: a node was lost" >&2
    code=84
fi
if ((code == 75 || code == 84)) && ((RESTARTS > 0)); then
    RESTARTS=$((RESTARTS - 1)) qsub "${options[@]}" -v PYTHON,RUN,MAX_TIME,RESTARTS,CONTAINER,ARGUMENTS,QSUB jobs/pbs.sh
fi
exit "$code"
