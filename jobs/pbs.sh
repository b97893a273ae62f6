#!/bin/bash
# hvdtrain on PBS (OpenPBS, PBS Pro, Torque), from the folder that holds jobs/; qsub takes no words for the job, so WORDS has them:
#   WORDS="--config configs/cifar10.yaml data.root=/scratch/data" MAX_TIME=3.9h qsub -v WORDS,MAX_TIME -l walltime=4:00:00 jobs/pbs.sh
# Before MAX_TIME is over, and on `qsig -s USR2 JOB`, it writes a checkpoint and submits itself again. `qdel` ends it without one.
# qsub's own options are not known in here: say them in QSUB too (QSUB="-q long -l walltime=4:00:00"), or below, for the next submission.
#PBS -N hvdtrain
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=04:00:00
#PBS -j oe
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

PYTHON=${PYTHON:-python3}                   # of the environment that has hvdtrain, on every node
RUN=${RUN:-runs/pbs-${PBS_JOBID%%.*}}       # seen by the first node; the next submission goes on in it
MAX_TIME=${MAX_TIME:-}                      # a little less than the walltime; PBS tells no job when it ends
RESTARTS=${RESTARTS:-50}                    # that are left
CONTAINER=${CONTAINER:-}                    # an image: the ranks run inside it
WORDS=${WORDS:-}                            # without spaces inside of a word
QSUB=${QSUB:-}                              # qsub's options for the next submission
export PYTHON RUN MAX_TIME RESTARTS CONTAINER WORDS QSUB

# Open MPI notices a dead node after time + probes x intvl seconds; without these after 8 minutes, or not before TCP does.
export PRTE_MCA_oob_tcp_keepalive_time=${PRTE_MCA_oob_tcp_keepalive_time:-30}
export PRTE_MCA_oob_tcp_keepalive_intvl=${PRTE_MCA_oob_tcp_keepalive_intvl:-10}
export PRTE_MCA_oob_tcp_keepalive_probes=${PRTE_MCA_oob_tcp_keepalive_probes:-3}

read -ra words <<<"$WORDS" || true
read -ra options <<<"$QSUB" || true
for word in "${words[@]}" "$@"; do
    if [[ $word == run=* ]]; then
        echo "pbs.sh: the run folder is RUN=${word#run=}, not a word of WORDS" >&2
        exit 2
    fi
done
[[ -z $MAX_TIME ]] || words+=(--max-time "$MAX_TIME")
"$PYTHON" -m hvdtrain launch --hostfile "$PBS_NODEFILE" ${CONTAINER:+--container "$CONTAINER"} -- run="$RUN" "${words[@]}" "$@" &
launcher=$!
trap 'kill -USR2 "$launcher" 2>/dev/null || true' USR1 USR2 TERM # the launcher passes USR2 on; TERM would end the ranks at once
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a trapped signal ends wait, not the launcher
    code=0
    wait "$launcher" || code=$?
done

if ((code == 0)) && ! tail -n 1 "$RUN/events.jsonl" | grep -q '"kind": "end"'; then
    echo "pbs.sh: the launcher ended with 0, but the job did not: a node was lost" >&2
    code=84
fi
if ((code == 75 || code == 84)) && ((RESTARTS > 0)); then
    RESTARTS=$((RESTARTS - 1)) qsub "${options[@]}" -v PYTHON,RUN,MAX_TIME,RESTARTS,CONTAINER,WORDS,QSUB jobs/pbs.sh
fi
exit "$code"
