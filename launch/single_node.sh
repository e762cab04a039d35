#!/usr/bin/env bash
# Run a task on this machine: a rank on each GPU, or two on the CPU.
#
#   launch/single_node.sh tasks/tp_llama.py --model unsloth/Llama-3.2-1B
#   NPROC=4 launch/single_node.sh --dry-run tasks/kv_cache.py      # print the command, run nothing
#
# Variables: NPROC, ranks; MAX_RESTARTS, of all ranks when one dies, default 0 (Task 5 goes on from
# its newest checkpoint); OMP_NUM_THREADS, threads of a rank, default 1; TORCHRUN, which one.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

count_gpus 2
MAX_RESTARTS=${MAX_RESTARTS:-0}

# --standalone takes a free port by itself: two jobs on one machine do not meet. Without an address
# torchrun looks for the host by its own name, and waits for minutes where that does not resolve.
start --standalone --local-addr 127.0.0.1 --nproc_per_node "$NPROC" --max-restarts "$MAX_RESTARTS"
