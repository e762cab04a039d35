"""Random collectives through shared memory, each held against gloo's. Argument: how many.

All ranks draw the same kinds and sizes, and each its own values and pauses.
"""

import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tasks"))
import shared_memory
from shared_memory import NAME, SLOT

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
          torch.bool]  # fmt: skip
SIZES = [0, 1, 2, 7, 64, 1000, 2**15, 300_001, SLOT, 3 * SLOT // 2 + 5]  # in bytes, or thereabouts
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def main(count):
    dist.init_process_group(NAME)
    rank, P = dist.get_rank(), dist.get_world_size()
    common, own = random.Random(1), random.Random(rank)
    torch.manual_seed(rank)
    members = sorted(common.sample(range(P), max(1, P - 1)))
    pairs = [(None, dist.new_group(backend="gloo"), list(range(P)))]
    if len(members) > 1:
        pairs.append((dist.new_group(members), dist.new_group(members, backend="gloo"), members))
    for number in range(count):
        ours, gloo, ranks = common.choice(pairs)
        dtype, kind = common.choice(DTYPES), common.choice(list(KINDS))
        draw = random.Random(common.random())
        if rank not in ranks:
            continue
        if own.random() < 0.05:
            time.sleep(own.expovariate(200))
        n = draw.choice(SIZES) // dtype.itemsize

        def make(n, dtype=dtype):
            if dtype.is_floating_point:
                return torch.randn(n, dtype=torch.float64).to(dtype)
            return torch.randint(2 if dtype == torch.bool else 5, (n,), dtype=dtype)

        state = draw.getstate(), torch.get_rng_state()
        results = []
        for group in (ours, gloo):
            draw.setstate(state[0])
            torch.set_rng_state(state[1])
            results.append(KINDS[kind](make, n, group, ranks, draw, dtype))
        if results[0] is None:
            continue
        ours, theirs, sums = *(result[0] for result in results), results[0][1]
        said = f"{number}: {kind}, {dtype}, {n} values on ranks {ranks}"
        if sums and dtype.is_floating_point:
            info = torch.finfo(dtype)
            bound = 2 * P * info.eps * (theirs.double().abs() + results[0][2] + info.tiny)
            far = ((ours.double() - theirs.double()).abs() > bound).nonzero().flatten()[:3]
            assert not len(far), (said, ours[far], theirs[far], bound[far])
        else:
            assert torch.equal(ours, theirs), said
    dist.barrier()
    assert not shared_memory.WAITING
    print(f"{count} collectives")


def all_reduce(make, n, group, ranks, draw, dtype):
    x, op = make(n), draw.choice(OPS[: 1 if dtype == torch.bool else 4])
    if dtype == torch.bool:
        x = x.to(torch.uint8)
    if draw.random() < 0.3 and dist.get_backend(group) == NAME:  # not contiguous: not for gloo
        x = torch.stack([x, x], dim=-1)[..., 0]
    size = torch.stack([p.abs() if p.is_floating_point() else p for p in gathered(x, group, ranks)]).double()
    size = size.sum(0) if op == dist.ReduceOp.SUM else size.prod(0)
    dist.all_reduce(x, op=op, group=group)
    return x, True, size


def gathered(x, group, ranks):
    everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in ranks]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone


def all_gather(make, n, group, ranks, draw, dtype):
    x = make(n)
    if draw.random() < 0.5:
        return torch.cat(gathered(x, group, ranks)), False
    out = make(n * len(ranks))
    dist.all_gather_into_tensor(out, x, group=group)
    return out, False


def reduce_scatter(make, n, group, ranks, draw, dtype):
    if dtype == torch.bool:
        return None
    m = n // len(ranks)
    x, out = make(m * len(ranks)), make(m)
    size = torch.stack([p.abs() if p.is_floating_point() else p for p in gathered(x, group, ranks)]).double().sum(0)
    dist.reduce_scatter_tensor(out, x, group=group)
    me = dist.get_group_rank(group or dist.group.WORLD, dist.get_rank())
    return out, True, size[me * m : (me + 1) * m]


def all_to_all(make, n, group, ranks, draw, dtype):
    P, row = len(ranks), draw.choice([1, 3])
    sizes = [[draw.randrange(0, max(1, n // P) + 1) for _ in ranks] for _ in ranks]
    if draw.random() < 0.3:
        sizes = [[n // P] * P] * P
    me = dist.get_group_rank(group or dist.group.WORLD, dist.get_rank())
    received = [theirs[me] for theirs in sizes]
    x = make(row * sum(sizes[me])).view(-1, row)
    out = make(row * sum(received)).view(-1, row)
    dist.all_to_all_single(out, x, received, sizes[me], group=group)
    return out, False


def broadcast(make, n, group, ranks, draw, dtype):
    x = make(n)
    dist.broadcast(x, draw.choice(ranks), group=group)
    return x, False


def ring(make, n, group, ranks, draw, dtype):
    """Several messages to the next rank, begun before any is awaited."""
    place, P = ranks.index(dist.get_rank()), len(ranks)
    xs, outs = [make(n) for _ in range(3)], [make(n) for _ in range(3)]
    works = []
    for x, out in zip(xs, outs, strict=True):
        works.append(dist.isend(x, ranks[(place + 1) % P], group=group))
        works.append(dist.irecv(out, ranks[(place - 1) % P], group=group))
    for work in draw.sample(works, len(works)):
        work.wait()
    return torch.cat(outs), False


def objects(make, n, group, ranks, draw, dtype):
    everyone = [None] * len(ranks)
    dist.all_gather_object(everyone, "x" * dist.get_rank(), group=group)
    assert [len(said) for said in everyone] == ranks


def barrier(make, n, group, ranks, draw, dtype):
    dist.barrier(group=group)


KINDS = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, ring,
                                 objects, barrier)}  # fmt: skip

if __name__ == "__main__":
    main(int(sys.argv[1]))
