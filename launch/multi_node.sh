#!/usr/bin/env bash
# Run a task on several machines: the same command on each of them, within ten minutes.
#
#   HEAD=10.0.0.1 NNODES=2 launch/multi_node.sh tasks/tp_llama.py --model unsloth/Llama-3.2-1B
#   HEAD=10.0.0.1 launch/multi_node.sh --dry-run tasks/tp_llama.py     # print the command only
#
# Variables: HEAD, a name or address of the first machine that all can reach; NNODES, machines,
# default 2; NPROC, ranks on each, default its GPUs, else 1; PORT, free on HEAD, default 29400;
# JOB, a name that jobs on one HEAD and PORT do not share, default parallel-llama; LOCAL_ADDR and
# IFACE, this machine's address and interface, default those by which HEAD is reached; NODE_TIMEOUT,
# seconds of silence after which a machine is taken for lost, default 15; IS_HEAD, true or false, if
# HEAD is an address that the first machine does not know as its own; OMP_NUM_THREADS and TORCHRUN as
# in single_node.sh. Put --json and --output-dir on a disk that all machines share: rank 0 need not
# be on HEAD, and of pretrain_2d.py each rank writes. Nothing restarts by itself here: start it
# again, Task 5 with --resume.
#
# The machines need the same checkout, versions and flags, and a network that they trust: torchrun
# and gloo do not ask who connects.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

count_gpus 1
HEAD=${HEAD:-${SLURM_LAUNCH_NODE_IPADDR:-}}
NNODES=${NNODES:-2}
PORT=${PORT:-29400}
JOB=${JOB:-parallel-llama}
[[ $HEAD ]] || stop "HEAD is not set: the first machine's name or address"
whole NNODES
NODE_TIMEOUT=${NODE_TIMEOUT:-15}
whole PORT
whole NODE_TIMEOUT

# torchrun tells by names whether this machine is HEAD, and errs where there are several interfaces or
# no such name. Here it is HEAD if HEAD's address can be bound on it; its own address is the one that
# packets to HEAD carry.
facts=$(python3 - "$HEAD" "$PORT" "$NNODES" <<'END'
import socket, sys

head, port, nodes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    address = socket.gethostbyname(head)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        mine = probe.getsockname()[0]
except (OSError, OverflowError) as error:
    sys.exit(f"error: HEAD={head}: {error}")
if address.startswith("127.") and nodes > 1:
    print(f"note: HEAD={head} is {address}, which other machines cannot reach", file=sys.stderr)
try:
    with socket.socket() as probe:
        probe.bind((address, 0))
        is_head = "true"
except OSError:
    is_head = "false"
print(is_head, mine)
END
) || exit 2
read -r is_head found_addr <<<"$facts"
# Under Slurm several "machines" may be one (in a test), and the first is known anyway.
[[ -z ${SLURM_NODEID-} ]] || { [[ $SLURM_NODEID == 0 ]] && is_head=true || is_head=false; }
is_head=${IS_HEAD:-$is_head}
if [[ $is_head == true && ! $dry_run ]]; then
    python3 -c "import socket, sys; sys.exit(not socket.socket().connect_ex(('127.0.0.1', $PORT)))" ||
        stop "PORT=$PORT is in use here: name another one, on all machines"
fi
LOCAL_ADDR=${LOCAL_ADDR:-$found_addr}
IFACE=${IFACE:-$({ ip -o addr show to "$LOCAL_ADDR" 2>/dev/null || true; } | awk 'NR == 1 {print $2}')}
if [[ $IFACE ]]; then
    environment+=("GLOO_SOCKET_IFNAME=$IFACE" "NCCL_SOCKET_IFNAME==$IFACE")  # no eth10
fi
environment+=("NODE_TIMEOUT=$NODE_TIMEOUT")

start --nnodes "$NNODES" --nproc_per_node "$NPROC" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" \
    --rdzv-conf "is_host=$is_head" --local-addr "$LOCAL_ADDR"
