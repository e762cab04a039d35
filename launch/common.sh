# What the launch scripts share; sourced by them.
# shellcheck shell=bash

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

stop() {  # one line, as the tasks' own
    echo "error: $*" >&2
    exit 2
}

usage() {  # the comment at the head of the script
    sed -n '2,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p;}' "$0"
    exit "$1"
}

gpus() {  # how many there are for us
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        local ids id count=0
        IFS=, read -ra ids <<<"$CUDA_VISIBLE_DEVICES"
        for id in ${ids[@]+"${ids[@]}"}; do  # -1, NoDevFiles: none from there on
            [[ $id =~ ^\ *(GPU|MIG|[0-9]) ]] || break
            count=$((count + 1))
        done
        echo "$count"
    else
        { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true
    fi
}

whole() {  # whole NAME: its value is a whole number above 0
    [[ ${!1} =~ ^[1-9][0-9]*$ ]] || stop "$1=${!1}: must be a whole number above 0"
}

# The command line of all: [--dry-run] SCRIPT [FLAG ...]
dry_run=
case ${1-} in
    '') usage 2 >&2 ;;
    -h | --help) usage 0 ;;
    --dry-run) dry_run=yes && shift ;;
esac
script=${1-}
[[ -f $script ]] || stop "no such task here: '$script' (tasks/tp_llama.py, say, in the checkout)"

if [[ -z ${TORCHRUN-} ]]; then  # the project's own, after `make demo`; else the one on the PATH
    TORCHRUN=$repo/.venv/bin/torchrun
    [[ -x $TORCHRUN ]] || TORCHRUN=$(command -v torchrun) || stop "no torchrun: run make demo first"
fi

# A restarted rank must not read the addresses of a dead attempt (pytorch issue 135712). And torchrun
# kills ranks so many seconds after a signal, in which Task 5 ends its step and saves.
environment=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}")

flags=("$@")  # of the script, after its name
unset 'flags[0]'
device=()

count_gpus() {  # count_gpus DEFAULT: set NPROC to the number of GPUs, without any to DEFAULT
    local found
    found=$(gpus)
    [[ " ${flags[*]-} " =~ \ --device[\ =]cpu\  ]] && found=0  # they are not to be used
    if [[ -z ${NPROC-} && $found -gt 0 ]]; then
        device=(--device cuda)  # a rank for each, or an error: not as many on the CPU
    fi
    NPROC=${NPROC:-$((found > 0 ? found : $1))}
    whole NPROC
}

start() {  # torchrun with these flags, in this process's place: signals reach it; or say so only
    set -- "$@" "$script" ${device[@]+"${device[@]}"} ${flags[@]+"${flags[@]}"}
    if [[ $dry_run ]]; then
        printf '%q ' env "${environment[@]}" "$TORCHRUN" "$@"
        echo
    else
        exec env "${environment[@]}" "$TORCHRUN" "$@"
    fi
}
