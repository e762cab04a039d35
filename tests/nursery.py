"""A process that has imported what the scripts import, and forks the ranks of jobs from itself.

`launch.ranks` starts it and sends it jobs, each a line of JSON. A rank begins where a fresh Python
would be after those imports. The scripts' own modules are never among them: each rank imports them
anew, from the folder of the script that it runs.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.profiler", "transformers.generation",
    "transformers.models.llama.modeling_llama", "tokenizers", "peft", "filelock", "psutil",
    "safetensors.torch", "huggingface_hub",
]  # fmt: skip
GRACE_S = 0.2  # in which the other ranks tell their part, once one has failed


def main():
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()  # so that a rank's collector does not touch, and copy, all of this
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(path, words, environments, folder, timeout):
    """One job: its ranks' exit codes (None where it had to be killed) and CPU seconds."""
    begin = time.monotonic()
    living, codes, cpu_s = {}, [None] * len(words), 0.0
    for rank, (of_rank, environment) in enumerate(zip(words, environments, strict=True)):
        living[fork(path, of_rank, environment, f"{folder}/rank{rank}")] = rank
    until, killed = begin + timeout, False
    while living:
        process, status, usage = os.wait4(-1, 0 if killed else os.WNOHANG)
        now = time.monotonic()
        if process:
            code, rank = os.waitstatus_to_exitcode(status), living.pop(process)
            cpu_s += usage.ru_utime + usage.ru_stime
            codes[rank] = codes[rank] if killed else code
            if code and not killed:
                until = min(until, now + GRACE_S)
        elif now < until:
            time.sleep(0.003)
        else:
            killed = True
            for process in living:
                os.kill(process, signal.SIGKILL)
    return {"codes": codes, "cpu_s": cpu_s, "late": killed}


def fork(path, words, environment, log):
    """A rank's process."""
    if process := os.fork():
        return process
    code = 1
    try:
        for number, target in enumerate((os.devnull, f"{log}.out", f"{log}.err")):
            file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(environment)
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read at import, before
        sys.argv, sys.path[0] = [path, *words], str(Path(path).parent)
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
