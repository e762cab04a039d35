"""Attention of a sequence that is split over ranks: this project's functions, and others'.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 -m figures.bench.attention_peers \\
        --gloo --json figures/records/attention_peers.json

Each takes the same cases, forward and backward, in float32, beside PyTorch's attention of the full
sequence in float64: how far off the output and the three gradients are, by rms, as a share of their
size; or in what words it is refused. DeepSpeed's (arXiv 2309.14509) is there where it is installed:
`pip install deepspeed`, in an environment of its own. PyTorch's is `context_parallel`.
"""

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from figures.bench.records import here_and_now
from harness.flags import make_parser
from harness.job import start
from ring_attention import Ring, ring_attention
from ulysses_forward import by_documents, ulysses_attention
from utils.errors import one_line
from utils.kernels import repeat_kv_heads
from utils.partition import shard_range
from utils.sequence import MaskInfo

D = 16
CASES = {  # name: (query heads, KV heads, tokens, what is masked)
    "heads and tokens that divide": (8, 4, 64, None),
    "fewer KV heads than ranks": (8, 2, 64, None),
    "KV heads that do not divide": (10, 5, 64, None),
    "tokens that do not divide": (8, 4, 65, None),
    "padding on the left": (8, 4, 64, "padding"),
    "packed documents": (8, 4, 64, "documents"),
}


def main():
    start(make_parser(__doc__).parse_args(), measure)


def measure(run, args):
    run.results |= here_and_now(run.device.type, run.world_size) | {"cases": {}}
    if find_spec("deepspeed"):
        run.results["deepspeed"] = version("deepspeed")
    ways = {
        "`ulysses_attention`": by_ulysses,
        "`ring_attention`": partial(by_ring, zigzag=False),
        "`ring_attention`, zigzag": partial(by_ring, zigzag=True),
        "PyTorch's `context_parallel`": by_context_parallel,
        "DeepSpeed's `DistributedAttention`": by_deepspeed,
    }
    for case, shape in CASES.items():
        found = run.results["cases"][case] = {}
        for name, way in ways.items():
            found[name] = one_case(run, way, *shape)
            run.print0(f"{case}, {name}: {found[name]}")
        for name in list(ways)[:3]:
            off = torch.tensor(found[name]) if isinstance(found[name], float) else torch.ones(())
            run.check(f"{case}, {name}", [(off, 0 * off)], tolerance=1e-6)


def one_case(run, way, N, K, S, masked):
    """The largest of the four errors, of all ranks; or an error's line."""
    torch.manual_seed(run.seed)
    full = [torch.randn(2, heads, S, D) for heads in (N, K, K, N)]
    mask = mask_of(masked, S)
    real = torch.ones(2, S, dtype=bool) if mask.real is None else mask.real
    full[3] *= real[:, None, :, None]  # what comes of padding is nobody's
    expected = step(partial(alone, mask), [t.double() for t in full])
    try:
        found, tokens = way(full, mask)
    except Exception as error:
        return one_line(error)[:120]
    squares = []
    for ours, theirs in zip(found, expected, strict=True):
        seen = real[:, None, tokens, None]
        off = (ours - theirs[:, :, tokens]).double() * seen
        both = torch.stack([off.square().sum(), (theirs[:, :, tokens] * seen).square().sum()])
        squares.append(run.gather(both).sum(0))
    return max((off / of).sqrt().item() for off, of in squares)


def mask_of(masked, S):
    real, documents = torch.ones(2, S, dtype=bool), torch.zeros(2, S, dtype=torch.long)
    real[1, : S // 3] = False
    documents[:, S // 4 :], documents[1, S // 2 :] = 1, 2
    if masked == "padding":
        return MaskInfo(S, real=real)
    return MaskInfo(S, documents=documents if masked else None)


def step(attend, tensors):
    """Output and the gradients of q, k and v."""
    q, k, v, grad = tensors
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def alone(mask, q, k, v):
    """PyTorch's attention, of (B, heads, S, D)."""
    k, v = (repeat_kv_heads(x, q.shape[1]) for x in (k, v))
    seen = mask.full()
    if mask.documents is not None:
        same = mask.documents[:, None, :, None] == mask.documents[:, None, None]
        seen = same & torch.ones(mask.length, mask.length, dtype=bool).tril()
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)


def by_ulysses(full, mask):
    group, S = dist.group.WORLD, mask.length
    tokens = slice(*shard_range(S, group.size(), group.rank()))
    attend = partial(alone, mask)
    if mask.documents is not None:
        attend = partial(by_documents, partial(alone, MaskInfo(S)), documents=mask.documents)
    attend = partial(ulysses_attention, group=group, attend=attend, length=S)
    return step(attend, [t[:, :, tokens] for t in full]), tokens


def by_ring(full, mask, zigzag):
    group, S = dist.group.WORLD, mask.length
    order = Ring(group, S, zigzag, mask).order()
    tokens = order[slice(*shard_range(S, group.size(), group.rank()))]
    seen = None if mask.sees_all else mask.to_tensor()
    attend = partial(ring_attention, group=group, length=S, zigzag=zigzag, mask=seen)
    return step(attend, [t[:, :, tokens] for t in full]), tokens


def by_context_parallel(full, mask):
    if not mask.sees_all:
        raise ValueError("it has no argument for that")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    places = torch.arange(mask.length)
    buffers = [*(t.clone() for t in full), places]
    dims = [2] * len(full) + [0]
    shards = context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims)
    with shards, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        gqa = buffers[0].shape[1] != buffers[1].shape[1]
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=gqa)
        try:
            return step(attend, buffers[:4]), places
        except NotImplementedError:
            raise ValueError("not on a CPU: it does not know the kernel") from None


def by_deepspeed(full, mask):
    if not find_spec("deepspeed"):
        raise ValueError("not installed")
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    group, S = dist.group.WORLD, mask.length
    tokens = slice(*shard_range(S, group.size(), group.rank()))
    if S % group.size():  # tried: gloo ends the job
        raise ValueError("messages of unequal sizes end the job")
    if (K := full[1].shape[1]) > group.size() and K % group.size():
        raise ValueError("not run: such heads want the groups that its engine makes")

    class Local(nn.Module):
        """Attention of some heads, of (B, S, heads, D)."""

        def forward(self, *qkv):
            return alone(mask, *(t.transpose(1, 2) for t in qkv)).transpose(1, 2)

    layer = DistributedAttention(Local(), group, scatter_idx=2, gather_idx=1)

    def attend(*qkv):
        return layer(*(t.transpose(1, 2) for t in qkv), 0).transpose(1, 2)

    return step(attend, [t[:, :, tokens] for t in full]), tokens


if __name__ == "__main__":
    main()
