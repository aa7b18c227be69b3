#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/torchrun.sh PROCESSES SCRIPT [its arguments]; dist_train.sh and dist_test.sh call it.
# NNODES, NODE_RANK, MASTER_ADDR and PORT as in dist_train.sh.
meeting=(--standalone)
if [ "${NNODES:-1}" != 1 ] || [ -n "${PORT:-}" ]; then
    meeting=(--nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}"
        --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}")
fi
exec python -m torch.distributed.run "${meeting[@]}" --nproc_per_node="$1" "${@:2}"
