"""Where the ranks of a test run: on the CPU, or on GPUs by NCCL. A test is parametrised over both.

NCCL wants a GPU for each rank, or a version that lets ranks share one (see the README's
--share-gpus). Where it has neither, the test is skipped, and the reason says what is missing.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch

import launch
from harness.environment import Sharing, count_gpus, share_gpus

GPUS = ",".join(map(str, range(torch.cuda.device_count())))
ON_GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", GPUS)}


def why_not_nccl(nproc, gpus=None):
    """What is missing here for so many ranks by NCCL, in words; None if nothing is.

    gpus: that they may use; by default all.
    """
    gpus = count_gpus() if gpus is None else min(gpus, count_gpus())
    if not gpus:
        return "no GPU: nothing is run by NCCL"
    rank = replace(Sharing.of_this_rank(), local_ranks=nproc, gpus=gpus)
    backend, note = share_gpus([rank] * nproc)
    return None if backend == "nccl" else note


@dataclass(frozen=True)
class Place:
    """timeout_s: a --timeout that ranks at work keep to, also in their first seconds.

    slow_s: by how many seconds the start of a job may take longer than on a CPU.
    """

    name: str
    env: dict
    timeout_s: int
    slow_s: int

    def __str__(self):
        return self.name

    def flags(self, nproc):
        """Those that send so many ranks there; else the test is skipped."""
        if self is CPU:
            return ["--device", "cpu"]
        if why := why_not_nccl(nproc):
            pytest.skip(why)
        return ["--device", "cuda", *["--share-gpus"] * (nproc > count_gpus())]

    def run(self, path, *args, nproc, folder):
        """`launch.ranks`; on GPUs torchrun: CUDA does not outlive a fork."""
        args = [*args, *self.flags(nproc)]
        if self is CPU:
            return launch.ranks(path, *args, nproc=nproc, folder=folder)
        return launch.torchrun(path, *args, nproc=nproc, env=self.env)


CPU = Place("cpu", {}, 4, 0)
NCCL = Place("nccl", ON_GPUS, 15, 30)
PLACES = CPU, NCCL
