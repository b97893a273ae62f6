#!/bin/bash
# The nodes of this SLURM allocation that are up, one a line with its ranks: n1:4. For hvdtrain launch --elastic --hosts-from jobs/slurm-hosts.sh
# A node that is drained or does not respond (sinfo marks it with *) is left out, and is there again when that is over. One that was down is no
# longer of the allocation (--no-kill): SLURM gives it back to a requeued job only.
set -euo pipefail

slots=${SLURM_NTASKS_PER_NODE:-1}
nodes=$(squeue --noheader --jobs="${SLURM_JOB_ID:?this is no SLURM job}" --format=%N)
[[ -n $nodes ]] || exit 0
sinfo --noheader --Node --nodes="$nodes" --format='%N %t' | sort -u | while read -r node state; do
    case $state in
        *'*' | down* | dr* | fail* | maint* | unk* | power*) ;;
        *) echo "$node:$slots" ;;
    esac
done
