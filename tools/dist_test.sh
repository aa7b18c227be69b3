#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
# NNODES, NODE_RANK, MASTER_ADDR and PORT as in dist_train.sh.
set -e
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
    exit 2
fi
meeting=(--standalone)
if [ "${NNODES:-1}" != 1 ] || [ -n "${PORT:-}" ]; then
    meeting=(--nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}"
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}")
fi

python -m torch.distributed.run "${meeting[@]}" --nproc_per_node="$3" \
    "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
