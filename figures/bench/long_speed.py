"""How long a step of prompt tuning takes at 16,384 tokens, beside checkpointing, in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m figures.bench.long_speed \\
        --model random/small --json figures/records/long_speed.json

Four contenders: one process, with as many threads as all ranks, that recomputes layers, with loss
and MLP in tiles; the same with a selective checkpoint, which keeps attention's outputs; the same
process with `tasks/memory/long_sequence.py`; and that on all ranks. Then their losses are compared.
"""

import statistics
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from figures.bench.records import here_and_now
from guards.agreement import without_comparing
from harness.finetune import adapter_config, default_tile_mib, load_adapted
from harness.flags import make_parser, positive
from harness.job import start
from harness.measure import interleave, num_threads, ratio
from memory.long_sequence import Techniques
from ulysses_finetune import forward_backward
from ulysses_forward import sequence_parallelize
from utils.llama import llama_of


def main():
    parser = make_parser(__doc__, model="random/small")
    add = parser.add_argument
    add("--seq-len", type=positive, default=16384, help="tokens and virtual tokens; default 16384")
    add("--num-virtual-tokens", type=positive, default=32, help="default 32")
    add("--repeats", type=positive, default=7, help="timed steps of each; default 7")
    start(parser.parse_args(), measure)


def measure(run, args):
    """Seconds of each contender's steps, after which their losses are compared."""
    adapter = adapter_config("prompt", args.num_virtual_tokens)
    mesh = run.mesh("sp")
    parallelize = partial(sequence_parallelize, mesh=mesh)
    model = run.together(lambda: load_adapted(run, adapter, parallelize))
    length = args.seq_len - args.num_virtual_tokens
    ids = run.broadcast(torch.randint(run.source.config.vocab_size, (1, length)))
    first, own_threads, alone, losses = dist.new_group([0]), torch.get_num_threads(), None, {}
    if run.rank == 0:
        alone = DeviceMesh.from_group(first, run.device.type, mesh_dim_names=("alone",))
    run.results |= here_and_now(run.device.type, run.world_size)

    def step(name, mesh, techniques):
        if mesh:  # else rank 0 is alone with it
            llama_of(model).get_group = mesh.get_group  # by which it deals out its tokens
            # (Rank 0 alone has nobody to compare batches with.)
            threads = num_threads(own_threads * (run.world_size // mesh.size()))
            with threads, without_comparing():
                losses[name] = forward_backward(model, ids, mesh, techniques)
            model.zero_grad()
        yield "step"

    tile = {"tile_bytes": default_tile_mib(run.device) * 2**20}
    checkpointing = Techniques("checkpoint", head_groups=False, **tile)
    selective = Techniques("selective", head_groups=False, **tile)
    ranks = f"long_sequence.py, {run.world_size} rank(s)"
    contenders = {
        "checkpointing, tiled loss and MLP": (alone, checkpointing),
        "selective checkpoint, tiled loss and MLP": (alone, selective),
        "long_sequence.py": (alone, Techniques(**tile)),
        ranks: (mesh, Techniques(**tile)),
    }
    steps = {name: partial(step, name, *how) for name, how in contenders.items()}
    seconds = interleave(run, steps, args.repeats, warmup=1)
    baseline = next(iter(contenders))
    dist.all_reduce(losses[ranks])
    for name in contenders:
        values = [run.broadcast(losses.get(which)) for which in (name, baseline)]
        # Two runs are compared here, without a wider one: by 1e-5 of the loss, as ever.
        bound = None if run.dtype == torch.float64 else 1e-5 * values[1].abs().item()
        run.check(f"loss: {name}", [values], bound)
        laps = seconds[name]["step"]
        of_first = ratio(laps, seconds[baseline]["step"])
        run.print0(f"{name}: {statistics.median(laps):.2f} s a step, {of_first} of the first")
        run.results[name] = {"step_s": laps}


if __name__ == "__main__":
    main()
