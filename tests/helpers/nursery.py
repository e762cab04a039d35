"""A process that has imported what the scripts import, and forks the ranks of jobs from itself.

`launch.ranks` and `make gpu` start it and send it jobs, each a line of JSON. A rank begins where a
fresh Python would be after those imports. The scripts' own modules are never among them: each rank
imports them anew, from the folder of the script that it runs.

Several jobs may run at once: each has a process of its own here, which forks its ranks, waits for
them and prints how they ended. CUDA must not be touched before a fork, for then no rank could use
it: the mother looks at no GPU, and checks that no import has.
"""

import ctypes
import gc
import importlib.util
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
TOUCHED = "an import has started CUDA: no rank could use it"
GRACE_S = 0.2  # in which the other ranks tell their part, once one has failed
LEFT_S = 3.0  # in which what ranks have started must end, after them
STACKS_S = 1.0  # in which ranks that took too long print where they stand (see `harness.job`)


def main():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
    for name in PRELOADED:
        __import__(name)
    prepare_loading()
    check_untouched()
    gc.collect()
    gc.freeze()  # so that a rank's collector does not touch, and copy, all of this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for what a job's process is
    mother = os.getpid()
    for line in sys.stdin:
        if os.fork() == 0:
            look_after(json.loads(line), mother)


def prepare_loading():
    """Have transformers compile its thousand patterns of weights' names, as every load would."""
    if importlib.util.find_spec("transformers.conversion_mapping"):  # since transformers 5
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def check_untouched():
    """Fail where an import has started CUDA: a process that is forked then cannot use it."""
    import torch

    assert not torch.cuda.is_initialized(), TOUCHED


def look_after(job, mother):
    """A job's own process: run it, print how it ended, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    number = job.pop("number")
    try:
        import torch

        assert not torch.cuda._is_in_bad_fork(), TOUCHED  # the driver's part of it, as a child sees
        ended = run(**job, mother=mother)
    except BaseException:
        ended = {"error": traceback.format_exc()[-2000:]}
    os.write(1, (json.dumps({"number": number, **ended}) + "\n").encode())  # whole, in one piece
    os._exit(0)


def run(path, words, environments, folder, timeout, mother):
    """One job: its ranks' exit codes (None where it had to be killed), CPU seconds, survivors.

    Ranks that are late print their stacks before they are killed. If the mother ends, so do they.
    """
    begin = time.monotonic()
    if sys.platform == "linux":  # what outlives the rank that started it becomes a child of this
        ctypes.CDLL(None).prctl(36, 1)  # 36 = PR_SET_CHILD_SUBREAPER
    living, codes, cpu_s = {}, [None] * len(words), 0.0
    for rank, (of_rank, environment) in enumerate(zip(words, environments, strict=True)):
        living[fork(path, of_rank, environment, f"{folder}/rank{rank}")] = rank
    until, killed = begin + timeout, False
    while living:
        process, status, usage = os.wait4(-1, 0 if killed else os.WNOHANG)
        now = time.monotonic()
        if process and process not in living:
            continue  # a rank had started it
        if process:
            code, rank = os.waitstatus_to_exitcode(status), living.pop(process)
            cpu_s += usage.ru_utime + usage.ru_stime
            codes[rank] = codes[rank] if killed else code
            if code and not killed:
                until = min(until, now + GRACE_S)
        elif now < until and os.getppid() == mother:
            time.sleep(0.003)
        else:
            killed = True
            if not any(codes):  # none has failed: they hang, or have too much to do
                for process in living:
                    os.kill(process, signal.SIGUSR1)
                time.sleep(STACKS_S)
            for process in living:
                os.kill(process, signal.SIGKILL)
    return {"codes": codes, "cpu_s": cpu_s, "late": killed, "survivors": end_others()}


def end_others():
    """Wait for what the ranks have started, and kill what lives on; return these processes."""
    import psutil

    others = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(others, LEFT_S)
    for one in alive:
        one.kill()
    return [one.pid for one in alive]


def start(path):
    """Run a script as Python does; a program of figures/ as a module, as `python -m` does."""
    rooms = path.parents[1]
    if rooms.name == "figures" and (rooms / "__init__.py").exists():
        sys.path[0] = str(rooms.parent)
        name = f"figures.{path.parent.name}.{path.stem}"
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(path.parent)
        runpy.run_path(str(path), run_name="__main__")


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
        sys.argv = [path, *words]
        start(Path(path))
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
