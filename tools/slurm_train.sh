#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]
# Environment: GPUS (8 in all), GPUS_PER_NODE (8), CPUS_PER_TASK (5), SRUN_ARGS.
set -e
if [ $# -lt 4 ]; then
    echo "usage: $0 PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]" >&2
    exit 2
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# SRUN_ARGS is meant to be split into words
# shellcheck disable=SC2086
srun -p "$1" \
    --job-name="$2" \
    --gres="gpu:${GPUS_PER_NODE}" \
    --ntasks="${GPUS:-8}" \
    --ntasks-per-node="${GPUS_PER_NODE}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    python -u "$(dirname "$0")/train.py" "$3" --work-dir "$4" --launcher slurm "${@:5}"
