"""Random collectives through shared memory, each held against gloo's. Argument: how many.

All ranks draw the same kinds, sizes and groups, and each its own values and pauses. Shared
memory's run one after another. Gloo's, which wait long where ranks are more than cores, are begun
beside them, and awaited and compared a hundred at a time.
"""

import itertools
import random
import sys
import time
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tasks"))
from shared_memory import group as shared_group
from shared_memory import slots as shared_memory
from shared_memory.group import NAME

SLOT = shared_memory.SLOT = shared_group.SLOT = 2**16  # smaller, so that more are in pieces

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
          torch.bool]  # fmt: skip
SIZES = [0, 1, 2, 7, 64, 1000, 2**13, 75_001, SLOT, 3 * SLOT // 2 + 5]  # in bytes, or thereabouts
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


BATCH = 100
BEGUN = []  # what gloo works at
TAGS = defaultdict(itertools.count)  # of each group: gloo would mix up messages of one tag


def main(count):
    warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch 2.13 has other names, too
    dist.init_process_group(NAME)
    rank, P = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(1), random.Random(rank)
    torch.manual_seed(rank)
    everyone, some = list(range(P)), sorted(common.sample(range(P), max(2, P - 1)))
    pending = []
    pairs = [(dist.new_group(m), dist.new_group(m, backend="gloo"), m) for m in (everyone, some)]
    for number in range(count):
        if number % BATCH == 0:
            compare(pending)
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
        begun, results = groups[0].memory.steps, []
        for group in groups[: 1 if kind in ALONE else 2]:  # each draws the same
            draw.setstate(state[0])
            torch.set_rng_state(state[1])
            results.append(kind(make, n, group, ranks, draw))
        assert kind is ring or groups[0].memory.steps > begun, f"{kind.__name__}: by gloo, both"
        if kind not in ALONE:
            (ours, _), (theirs, size) = results
            said = f"{number}: {kind.__name__}, {dtype}, {n} values, of ranks {ranks}"
            pending.append((ours() + 0, theirs, size, said, P))
    compare(pending)
    dist.barrier()
    assert not shared_memory.WAITING
    print(f"{count} collectives passed\n", end="", flush=True)


def compare(pending):
    """Wait for gloo's, and hold shared memory's against them; exact, but for sums of floats."""
    for work in BEGUN:
        work.wait()
    BEGUN.clear()
    for ours, theirs, size, said, P in pending:
        theirs = theirs()
        if size is None or not ours.dtype.is_floating_point:
            assert torch.equal(ours, theirs), said
            continue
        info = torch.finfo(ours.dtype)
        bound = 2 * P * info.eps * (size() + info.tiny)
        far = ((ours.double() - theirs.double()).abs() > bound).nonzero().flatten()[:3]
        assert not len(far), (said, ours[far], theirs[far], bound[far])
    pending.clear()


def values(dtype, n):
    if dtype.is_floating_point:
        return torch.randn(n, dtype=torch.float64).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 5, (n,)).to(dtype)


def do(collective, *args, group):
    """By shared memory at once, by gloo begun. Returns its value."""
    if dist.get_backend(group) == NAME:
        return collective(*args, group=group)
    BEGUN.append(collective(*args, group=group, async_op=True))


# Each: a function that gives what came out, in one dimension, and of sums (by gloo) another for how
# large the parts are: rounding is of these.


def all_reduce(make, n, group, ranks, draw):
    x, op, gaps = make(n), draw.choice(OPS), draw.random() < 0.3
    if dist.get_backend(group) != NAME:
        sizes = magnitudes(x, group, op)
        do(partial(dist.all_reduce, op=op), x, group=group)
        return lambda: x, lambda: sizes
    if gaps:  # nothing for gloo
        x = torch.stack([x, x], dim=-1)[..., 0]
    dist.all_reduce(x, op=op, group=group)
    bits = gathered(x.contiguous(), group, ranks)().view(torch.uint8)
    assert (bits == bits[:1]).all(), "other bits on another rank"
    return lambda: x, None


def magnitudes(x, group, op=dist.ReduceOp.SUM):
    """By gloo: how large all ranks' x are, together."""
    size = x.double().abs()
    op = op if op == dist.ReduceOp.PRODUCT else dist.ReduceOp.SUM
    do(partial(dist.all_reduce, op=op), size, group=group)
    return size


def own_share(x, group, ranks):
    """Of such sizes what this rank gets; None by shared memory."""
    if dist.get_backend(group) != NAME:
        size = magnitudes(x, group)
        return lambda: size.chunk(len(ranks))[group.rank()]


def gathered(x, group, ranks):
    everyone = [torch.empty_like(x) for _ in ranks]
    do(dist.all_gather, everyone, x, group=group)
    return lambda: torch.stack(everyone)


def all_gather(make, n, group, ranks, draw):
    x = make(n)
    if draw.random() < 0.5:
        return gathered(x, group, ranks), None
    out = make(n * len(ranks))
    do(dist.all_gather_into_tensor, out, x, group=group)
    return lambda: out, None


def reduce_scatter(make, n, group, ranks, draw):
    x, out = make(n * len(ranks)), make(n)
    size = own_share(x, group, ranks)
    if draw.random() < 0.5:
        do(dist.reduce_scatter_tensor, out, x, group=group)
    else:
        do(dist.reduce_scatter, out, list(x.chunk(len(ranks))), group=group)
    return lambda: out, size


def all_to_all(make, n, group, ranks, draw):
    P, row = len(ranks), draw.choice([1, 3])
    sizes = [[draw.randrange(n // P + 1) for _ in ranks] for _ in ranks]
    if draw.random() < 0.3:
        sizes = [[n // P] * P] * P
    received = [theirs[group.rank()] for theirs in sizes]
    x = make(row * sum(sizes[group.rank()])).view(-1, row)
    out = make(row * sum(received)).view(-1, row)
    do(dist.all_to_all_single, out, x, received, sizes[group.rank()], group=group)
    return lambda: out, None


def broadcast(make, n, group, ranks, draw):
    x = make(n)
    do(dist.broadcast, x, draw.choice(ranks), group=group)
    return lambda: x, None


def ring(make, n, group, ranks, draw):
    """Several messages to the next rank, begun before any is awaited."""
    place, P, ours = group.rank(), len(ranks), dist.get_backend(group) == NAME
    xs, outs = [make(n) for _ in range(3)], [make(n) for _ in range(3)]
    jobs = []
    for number, (x, out) in enumerate(zip(xs, outs, strict=True)):
        tag = number if ours else next(TAGS[group])
        jobs.append(dist.P2POp(dist.isend, x, ranks[(place + 1) % P], group, tag))
        jobs.append(dist.P2POp(dist.irecv, out, ranks[(place - 1) % P], group, tag))
    works = dist.batch_isend_irecv(jobs)
    BEGUN.extend([] if ours else works)
    for work in draw.sample(works, len(works)) if ours else ():
        work.wait()
    return lambda: torch.cat(outs), None


def objects(make, n, group, ranks, draw):
    everyone = [None] * len(ranks)
    dist.all_gather_object(everyone, "x" * dist.get_rank(), group=group)
    assert [len(said) for said in everyone] == ranks


def functional(make, n, group, ranks, draw):
    """As DTensor asks for them, who begin, and wait when the value is used."""
    x = make(n * len(ranks))
    if draw.random() < 0.5:
        out, size = funcol.all_gather_tensor(x, 0, group), None
    else:
        out, size = funcol.reduce_scatter_tensor(x, "sum", 0, group), own_share(x, group, ranks)
    return lambda: out + 0, size


def barrier(make, n, group, ranks, draw):
    dist.barrier(group=group)


ALONE = objects, barrier  # which say themselves whether they are right
KINDS = [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, ring, functional, *ALONE]

if __name__ == "__main__":
    main(int(sys.argv[1]))
