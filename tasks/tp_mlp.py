"""Part 1: a Llama MLP, tensor-parallel: column- and row-parallel layers between f and g.

The one idea (Megatron-LM, arXiv 1909.08053, section 3): split the F hidden units of the MLP, not
its input or output. Each rank owns F/P units: their rows of gate_proj and up_proj (column-parallel:
the *output* dim is split) and their columns of down_proj (row-parallel: the *input* dim is split).
The activation works unit by unit, so nothing is sent in between; at the end one all-reduce sums
the ranks' partial sums. In the backward another one, in f, sums the gradients of the MLP's input.

    x --norm--> f --+--> gate_proj, up_proj (F/P units) --> act * --> down_proj --> g --> y
                    forward: nothing                     forward: all-reduce
                    backward: all-reduce                 backward: nothing

f and g are `copy_to_region` and `reduce_from_region`, in utils/collectives.py.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 tasks/tp_mlp.py

prints the reference's and every rank's outputs and input gradients, among them the golden values of
the assignment's demo (seed 1337, 4096 -> 14336, float32). It compares output and input gradient for
the loss .sum(), then all gradients for a random upstream gradient.

Two questions that the assignment leaves open:

* Recomputation and dropout. A block that is recomputed in the backward must drop the same values
  again. `torch.utils.checkpoint` restores the random state for that. A hand-written autograd
  function that calls the block again does not: it would fail the check `recomputed with dropout`.
* Do the gradients of the (replicated) norm have to be summed over ranks? No. f stands between the
  norm and the sharded layers, so what enters the norm's backward is summed already, and the norm's
  input is the same on all ranks: each rank computes the full gradient. The checks compare it with
  the reference's, and demand the same bits on all ranks.
"""

import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import harness
import loading
from utils.collectives import copy_to_region, group_of_axis, reduce_from_region
from utils.partition import shard_range
from utils.shards import keep_shard

# What the assignment prints for its demo: the first and the last three outputs and input gradients.
GOLDEN_OUTPUTS = [-0.1145, 0.0160, 0.0500, -0.1455, 0.1126, -0.0192]
GOLDEN_INPUT_GRAD = [0.0343, -0.2492, -0.1858, -0.0541, 0.0388, -0.1529]


class Block(nn.Module):
    """Norm, MLP and dropout, which is there to have something random to recompute."""

    def __init__(self, config):
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.dropout = 0.0

    def forward(self, x):
        """(B, S, H) -> (B, S, H). All ranks drop the same values, so all have the same output."""
        return dropout(self.mlp(self.norm(x)), self.dropout)


def tensor_parallelize_mlp(mlp, mesh):
    """Make a LlamaMLP tensor-parallel in place, over the ranks of `mesh`, which has one axis.

                  full        local
    gate_proj     (F, H)      (F/P, H)      column-parallel
    up_proj       (F, H)      (F/P, H)      column-parallel
    down_proj     (H, F)      (H, F/P)      row-parallel

    F need not be a multiple of P. Biases of gate_proj and up_proj are split with their units; the
    bias of down_proj must enter the sum over ranks once, so only rank 0 of the axis has it.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    group = group_of_axis(mesh)
    rank, ranks = group.rank(), group.size()
    units = shard_range(mlp.up_proj.out_features, ranks, rank)
    keep_shard(mlp.gate_proj, 0, *units)
    keep_shard(mlp.up_proj, 0, *units)
    keep_shard(mlp.down_proj, 1, *units)
    if rank != 0:
        mlp.down_proj.bias = None
    mlp.register_forward_pre_hook(lambda module, args: (copy_to_region(args[0], group),))
    mlp.register_forward_hook(lambda module, args, y: reduce_from_region(y, group))


# ---------------------------------------------------------------- what is shown with it


def empty_block(config, parallelize=None):
    """Return a Block without values, or with `parallelize` this rank's share of it."""
    with torch.device("meta"):
        block = Block(config)
    if parallelize:
        parallelize(block)
    return block


def make_demo(run, hidden_size, intermediate_size, parallelize):
    """Return the assignment's block (on rank 0), this rank's share of it, and its input, (1, H).

    Rank 0 builds the block from the seed and sends its weights; each rank keeps its slices.
    """
    sizes = dict(hidden_size=hidden_size, intermediate_size=intermediate_size)
    config = LlamaConfig(**sizes, num_attention_heads=1)
    reference, x = None, None
    if run.rank == 0:
        torch.manual_seed(run.seed)
        reference = run.place(Block(config))  # before x: the golden values need this order
        x = torch.randn(1, hidden_size, dtype=torch.float32)
    parallel = empty_block(config, parallelize)
    read = run.deal(reference, parallel)
    parallel = loading.materialize(parallel, read, run.dtype, run.device)
    return reference, parallel, run.broadcast(x).to(run.dtype)


def block_step(block, x, upstream=None, recompute=False):
    """Run one forward and backward; return the output and the input gradient, both like x.

    upstream: gradient of the output; default ones, which is the assignment's .sum().backward().
    recompute: keep no activations of the block but its input, and run it again in the backward.
    """
    block.zero_grad()
    x = x.to(block.norm.weight.dtype, copy=True).requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    assert x.grad is None  # the assignment's own assertion
    y.backward(torch.ones_like(y) if upstream is None else upstream.to(y.dtype))
    return y.detach(), x.grad


def compare(run, title, reference, parallel, x):
    """Run all checks of one block. reference: on rank 0, None elsewhere; x: the same on all ranks.

    For the loss .sum(), returns the parallel block's output and input gradient, and for each of the
    two the expected values: the reference's and, unless it is float64, those of a wider copy.
    """
    references = run.references(reference)
    run.check_weights(title, parallel, references)
    # The loss is .sum(), as in the assignment. expected_y: the reference's output and, unless that
    # is float64, a wider copy's, from which the errors of y and of the reference are measured.
    y, x_grad = block_step(parallel, x)
    expected_y, expected_x_grad = run.reference_values(
        lambda block: block_step(block, x), references
    )
    run.print0(f"--- {title}")
    run.show_as_asked(title, "outputs", expected_y[0], y)
    run.show_as_asked(title, "input grad", expected_x_grad[0], x_grad)
    run.check(f"{title} output", [(y, *expected_y)])
    run.check(f"{title} input grad", [(x_grad, *expected_x_grad)])
    run.check_same_bits(f"{title} output, same bits on all ranks", y)
    run.check_same_bits(f"{title} norm grad, same bits on all ranks", parallel.norm.weight.grad)

    # Every gradient, from a random gradient of the output, so that no symmetry hides a mistake.
    torch.manual_seed(run.seed)
    upstream = torch.randn_like(x)
    actual = block_step(parallel, x, upstream)[1]
    (expected,) = run.reference_values(lambda block: block_step(block, x, upstream)[1:], references)
    run.check(f"{title}, random upstream: input grad", [(actual, *expected)])
    run.check_gradients(f"{title}, random upstream:", parallel, references)

    # Recomputed in the backward, with dropout: it has to drop the same values again.
    parallel.dropout = 0.5
    results, calls = [], []
    counter = parallel.mlp.register_forward_hook(lambda *_: calls.append(1))
    for recompute in (False, True):
        torch.manual_seed(run.seed)
        results.append([*block_step(parallel, x, upstream, recompute)])
        results[-1] += [parameter.grad for parameter in parallel.parameters()]
    counter.remove()
    # One forward where activations are kept; two where they are recomputed in the backward.
    run.check(f"{title} forwards", [(torch.tensor(len(calls)), torch.tensor(3))], tolerance=0.0)
    dropped = results[0][0]
    run.check_same_bits(f"{title} with dropout, same bits on all ranks", dropped)
    some = (dropped == 0).any().float()
    pair = some, torch.ones_like(some)
    run.check(f"{title} with dropout, something is dropped", [pair], tolerance=0.0)
    name = f"{title} recomputed with dropout, same bits as kept"
    run.check(name, zip(*results, strict=True), tolerance=0.0)
    return (y, x_grad), (expected_y, expected_x_grad)


def main():
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add(
        "--hidden-size",
        type=harness.positive,
        default=4096,
        help="H of the demo's block; default 4096",
    )
    add(
        "--intermediate-size",
        type=harness.positive,
        default=14336,
        help="its F, MLP units; default 14336",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Check the first MLP of --model, with its sizes and weights; then the assignment's block."""
    mesh = run.mesh("tp")

    def parallelize(block):
        tensor_parallelize_mlp(block.mlp, mesh)

    def read(name, shard=None):
        name = name.replace("norm", "post_attention_layernorm")
        return run.source.read(f"model.layers.0.{name}", shard)

    def load(parallelize=None):
        block = empty_block(run.source.config, parallelize)
        return loading.materialize(block, read, run.dtype, run.device)

    config = run.source.config
    reference = load() if run.rank == 0 else None
    parallel = run.together(lambda: load(parallelize))
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float32)
    compare(run, args.model, reference, parallel, run.broadcast(x).to(run.dtype))

    sizes = args.hidden_size, args.intermediate_size
    reference, parallel, x = make_demo(run, *sizes, parallelize)
    (y, x_grad), expected = compare(run, "assignment", reference, parallel, x)
    if (*sizes, run.seed) == (4096, 14336, 1337) and run.dtype != torch.bfloat16:
        run.check_golden("output", y, GOLDEN_OUTPUTS)
        run.check_golden("input grad", x_grad, GOLDEN_INPUT_GRAD)
    if run.dtype == torch.float32:  # the reference's rounding alone, by the assignment's bound
        for what, (rounded, exact) in zip(("output", "input_grad"), expected, strict=True):
            run.check_allclose("reference", f"float32 {what}", rounded, exact, f"float64 {what}")


if __name__ == "__main__":
    main()
