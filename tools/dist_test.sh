#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
# NNODES, NODE_RANK, MASTER_ADDR and PORT as in dist_train.sh.
set -e
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
    exit 2
fi

bash "$(dirname "$0")/torchrun.sh" "$3" \
    "$(dirname "$0")/test.py" "$1" "$2" --launcher pytorch "${@:4}"
