"""Random collectives through shared memory, each held against gloo's. Argument: how many.

All ranks draw the same kinds, sizes and groups, and each its own values and pauses.
"""

import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tasks"))
from utils import shared_group, shared_memory
from utils.shared_group import NAME

SLOT = shared_memory.SLOT = shared_group.SLOT = 2**18  # smaller, so that more are in pieces

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
          torch.bool]  # fmt: skip
SIZES = [0, 1, 2, 7, 64, 1000, 2**15, 300_001, SLOT, 3 * SLOT // 2 + 5]  # in bytes, or thereabouts
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def main(count):
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch 2.13 has other names, too
    dist.init_process_group(NAME)
    rank, P = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(1), random.Random(rank)
    torch.manual_seed(rank)
    everyone, some = list(range(P)), sorted(common.sample(range(P), max(2, P - 1)))
    pairs = [(dist.new_group(m), dist.new_group(m, backend="gloo"), m) for m in (everyone, some)]
    for number in range(count):
        kind, dtype = common.choice(KINDS), common.choice(DTYPES)
        (*groups, ranks), draw = common.choice(pairs), random.Random(common.random())
        n = common.choice(SIZES) // dtype.itemsize
        if rank not in ranks:
            continue
        if own.random() < 0.05:
            time.sleep(own.expovariate(200))
        if dtype == torch.bool and kind in (all_reduce, reduce_scatter, functional):
            continue
        make, state = partial(values, dtype), (draw.getstate(), torch.get_rng_state())
        results = []
        begun = groups[0].memory.steps
        for group in groups:  # each draws the same
            draw.setstate(state[0])
            torch.set_rng_state(state[1])
            results.append(kind(make, n, group, ranks, draw))
        assert kind is ring or groups[0].memory.steps > begun, f"{kind.__name__}: by gloo, both"
        (ours, size), (theirs, _) = results
        said = f"{number}: {kind.__name__}, {dtype}, {n} values, of ranks {ranks}"
        if size is None or not dtype.is_floating_point:
            assert torch.equal(ours, theirs), said
            continue
        info = torch.finfo(dtype)
        bound = 2 * P * info.eps * (size + info.tiny)
        far = ((ours.double() - theirs.double()).abs() > bound).nonzero().flatten()[:3]
        assert not len(far), (said, ours[far], theirs[far], bound[far])
    dist.barrier()
    assert not shared_memory.WAITING
    print(f"{count} collectives passed\n", end="", flush=True)


def values(dtype, n):
    if dtype.is_floating_point:
        return torch.randn(n, dtype=torch.float64).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 5, (n,)).to(dtype)


# Each: what came out, in one dimension, and of sums how large the parts are: rounding is of these.


def all_reduce(make, n, group, ranks, draw):
    x, op = make(n), draw.choice(OPS)
    parts = gathered(x, group, ranks).double().abs()
    if draw.random() < 0.3 and dist.get_backend(group) == NAME:  # with gaps: nothing for gloo
        x = torch.stack([x, x], dim=-1)[..., 0]
    dist.all_reduce(x, op=op, group=group)
    bits = gathered(x.contiguous(), group, ranks).view(torch.uint8)
    assert (bits == bits[:1]).all(), "other bits on another rank"
    return x, parts.prod(0) if op == dist.ReduceOp.PRODUCT else parts.sum(0)


def gathered(x, group, ranks):
    everyone = [torch.empty_like(x) for _ in ranks]
    dist.all_gather(everyone, x, group=group)
    return torch.stack(everyone)


def all_gather(make, n, group, ranks, draw):
    x = make(n)
    if draw.random() < 0.5:
        return gathered(x, group, ranks), None
    out = make(n * len(ranks))
    dist.all_gather_into_tensor(out, x, group=group)
    return out, None


def reduce_scatter(make, n, group, ranks, draw):
    x, out = make(n * len(ranks)), make(n)
    parts = gathered(x, group, ranks).double().abs().sum(0)
    if draw.random() < 0.5:
        dist.reduce_scatter_tensor(out, x, group=group)
    else:
        dist.reduce_scatter(out, list(x.chunk(len(ranks))), group=group)
    return out, parts.chunk(len(ranks))[group.rank()]


def all_to_all(make, n, group, ranks, draw):
    P, row = len(ranks), draw.choice([1, 3])
    sizes = [[draw.randrange(n // P + 1) for _ in ranks] for _ in ranks]
    if draw.random() < 0.3:
        sizes = [[n // P] * P] * P
    received = [theirs[group.rank()] for theirs in sizes]
    x = make(row * sum(sizes[group.rank()])).view(-1, row)
    out = make(row * sum(received)).view(-1, row)
    dist.all_to_all_single(out, x, received, sizes[group.rank()], group=group)
    return out, None


def broadcast(make, n, group, ranks, draw):
    x = make(n)
    dist.broadcast(x, draw.choice(ranks), group=group)
    return x, None


def ring(make, n, group, ranks, draw):
    """Several messages to the next rank, begun before any is awaited."""
    place, P = group.rank(), len(ranks)
    xs, outs = [make(n) for _ in range(3)], [make(n) for _ in range(3)]
    jobs = []
    for tag, (x, out) in enumerate(zip(xs, outs, strict=True)):
        jobs.append(dist.P2POp(dist.isend, x, ranks[(place + 1) % P], group, tag))
        jobs.append(dist.P2POp(dist.irecv, out, ranks[(place - 1) % P], group, tag))
    works = dist.batch_isend_irecv(jobs)
    for work in draw.sample(works, len(works)):
        work.wait()
    return torch.cat(outs), None


def objects(make, n, group, ranks, draw):
    everyone = [None] * len(ranks)
    dist.all_gather_object(everyone, "x" * dist.get_rank(), group=group)
    assert [len(said) for said in everyone] == ranks
    return make(0), None


def functional(make, n, group, ranks, draw):
    """As DTensor asks for them."""
    x = make(n * len(ranks))
    if draw.random() < 0.5:
        return funcol.all_gather_tensor(x, 0, group) + 0, None
    scattered = funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0
    parts = gathered(x, group, ranks).double().abs().sum(0)
    return scattered, parts.chunk(len(ranks))[group.rank()]


def barrier(make, n, group, ranks, draw):
    dist.barrier(group=group)
    return make(0), None


KINDS = [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, ring, objects, functional,
         barrier]  # fmt: skip

if __name__ == "__main__":
    main(int(sys.argv[1]))
