#!/bin/bash
# The nodes of this SLURM allocation that are up, one a line with its ranks: n1:4. For hvdtrain launch --elastic --hosts-from jobs/slurm-hosts.sh
# A node that is down, drained or does not respond (sinfo marks it with *) is left out; one that comes back is there again.
set -euo pipefail

slots=${SLURM_NTASKS_PER_NODE:-1}
sinfo --noheader --Node --nodes="${SLURM_JOB_NODELIST:?this is no SLURM job}" --format='%N %t' | sort -u | while read -r node state; do
    case $state in
        *'*' | down* | dr* | fail* | maint* | unk* | power*) ;;
        *) echo "$node:$slots" ;;
    esac
done
