#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
# Without a GPU, GPUS is the number of processes. One machine finds a free port by itself, unless PORT
# is set. Over several machines, set on each of them NNODES, NODE_RANK, MASTER_ADDR, and PORT if
# 29500 is taken. If a process ends early, all do.
set -e
if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG GPUS [arguments of tools/train.py]" >&2
    exit 2
fi

bash "$(dirname "$0")/torchrun.sh" "$2" \
    "$(dirname "$0")/train.py" "$1" --launcher pytorch "${@:3}" || {
    status=$?
    echo "error: a training process failed, see above; the others were stopped. If a checkpoint was" \
        "saved, the same command with --resume goes on from it, with as many processes or fewer" \
        "(docs/distributed.md)." >&2
    exit $status
}
