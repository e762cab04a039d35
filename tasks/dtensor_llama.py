"""Task 3: the Llama of Task 2, tensor-parallel by a DTensor plan.

A DTensor is a tensor with a global shape, of which each rank holds a part: `Shard(0)` a slice of
dim 0, `Replicate()` all of it, `Partial()` a summand. Operators work out where their results lie,
and `redistribute` from one placement to another is a collective. Megatron's f and g are two such
changes of placement, and nothing else has to be written:

    g    forward: Partial -> Replicate, an all-reduce       backward: nothing
    f    forward: nothing      backward: the gradient is Partial, -> Replicate, an all-reduce

`PLAN` says where each module's weights, inputs and outputs lie; `parallelize_module` does the rest.
The vocabulary is split as in Task 2, and `loss_parallel` takes the cross-entropy of split logits.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/dtensor_llama.py

opens with the assignment's MLP (1024 -> 4096, golden values), then checks the model as Task 2 does,
continues a prompt by Hugging Face's own `.generate`, and measures time and memory. `--overfit` also
trains both models on one batch, to almost no loss along the same curve.
"""

from fnmatch import fnmatch
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import harness
import loading
from utils.collectives import group_of_axis, reduce_from_region, subgroup
from utils.errors import UserError
from utils.gradients import local_part
from utils.llama import expect_same_batches, getter, guard_dropout, next_tokens
from utils.partition import shard_heads
from utils.shards import (
    ReplicatedKVLinear,
    keep_shard,
    local_rows,
    refuse_on_slices,
    shard_of,
    sum_head_norm_grads,
    with_full_logits,
)

# ---------------------------------------------------------------- the technique

# A block's input becomes a DTensor once, for all of the block's projections: the gradients that
# they give it are added up as Partial DTensors, and the backward needs one all-reduce a block.
# Without these two entries each of the five projections would make its own DTensor, and five
# all-reduces would do the work of two.
ATTENTION_INPUT = PrepareModuleInput(
    input_kwarg_layouts={"hidden_states": Replicate()},
    desired_input_kwarg_layouts={"hidden_states": Replicate()},
)
MLP_INPUT = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))


class Local(ParallelStyle):
    """Applies a style, and makes the output local; `grad`: how the output's gradient is placed.

    The library's styles can make outputs local, too, but leave this placement to a default.
    """

    def __init__(self, style, grad):
        self.style, self.grad = style, grad

    def _apply(self, module, mesh):
        self.style.src_data_rank = getattr(self, "src_data_rank", 0)  # PyTorch sets it on self
        module = self.style._apply(module, mesh)
        module.register_forward_hook(lambda _, args, y: y.to_local(grad_placements=[self.grad]))
        return module


def all_reduce_to_local(total):
    """Add up a Partial DTensor: Megatron's g. What follows is the same on all ranks."""
    return total.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


class VocabularyRows(ParallelStyle):
    """Deals out an embedding's rows; a sum over the ranks brings a token's row to all of them.

    RowwiseParallel does the same, except in the backward: there a DTensor embedding makes the
    gradient of all V rows on every rank, (V, H); here a rank makes it of its own rows, (V/P, H).
    """

    sum = staticmethod(all_reduce_to_local)

    def _apply(self, module, mesh):
        rows = distribute_tensor(module.weight, mesh, [Shard(0)])
        module.weight = nn.Parameter(rows, requires_grad=module.weight.requires_grad)
        ranks, tokens, first = mesh.size(), len(module.weight), shard_of(module.weight)[0].start
        if (ranks - 1) * -(-tokens // ranks) >= tokens:  # equal chunks, the last shorter
            raise UserError(f"{ranks} ranks share {tokens} tokens: some have none; fewer ranks")

        module.__class__, module.first, module.sum = DTensorEmbedding, first, self.sum
        return module


class DTensorEmbedding(nn.Embedding):
    """Rows from `first` on of an embedding; a token's row comes from the rank that has it."""

    def forward(self, ids):
        """ids (B, S) -> (B, S, H), or this rank's tokens of it, by `sum`."""
        weight, mesh = self.weight.to_local(grad_placements=[Shard(0)]), self.weight.device_mesh
        rows = local_rows(ids, weight, self.first, self.num_embeddings, self.padding_idx)
        return self.sum(DTensor.from_local(rows, mesh, [Partial()]))


COLUMNS, ROWS = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
HEADS = Local(COLUMNS, grad=Shard(2))  # what goes into RoPE and attention: this rank's heads
SUM = Local(ROWS, grad=Replicate())  # g sums what goes into the residual stream, on all ranks

# The MLP's units stay DTensors, and may be uneven. Norms are not in the plan: they stay ordinary
# tensors, equal on all ranks, and so do their gradients.
PLAN = {
    "model.embed_tokens": VocabularyRows(),  # (V/P, H)
    "model.layers.*.self_attn": ATTENTION_INPUT,
    "model.layers.*.self_attn.q_proj": HEADS,  # (N/P D, H)
    "model.layers.*.self_attn.k_proj": HEADS,  # (K/P D, H)
    "model.layers.*.self_attn.v_proj": HEADS,  # (K/P D, H)
    "model.layers.*.self_attn.o_proj": SUM,  # (H, N/P D)
    "model.layers.*.mlp": MLP_INPUT,
    "model.layers.*.mlp.gate_proj": COLUMNS,  # (F/P, H)
    "model.layers.*.mlp.up_proj": COLUMNS,  # (F/P, H)
    "model.layers.*.mlp.down_proj": SUM,  # (H, F/P)
    "lm_head": COLUMNS,  # (V/P, H), logits (B, S, V/P)
}


def dtensor_parallelize(model, mesh, plan=PLAN):
    """Make a LlamaForCausalLM tensor-parallel in place, over the one axis of `mesh`.

    plan: {module name, * for any: ParallelStyle}. The number of KV heads need not be a multiple
    of the ranks', and may be smaller (`WholeHeads`). The model is used as before. Logits come out
    full; if `labels` are given, `output.logits` stays a DTensor, split over the vocabulary (see
    `split_loss`). The model may also be on the meta device. Raises UserError for more ranks than
    query heads, for ranks that would have no vocabulary entries, and for a plan that names modules
    that the model does not have; ValueError for a model that is split already, and for a
    mesh whose ranks do not ascend.
    Source: torch.distributed.tensor.parallel; Megatron-LM, arXiv 1909.08053, section 3.
    """
    group_of_axis(mesh)  # raises for a mesh of several
    from guards.refusals import refuse_order

    refuse_order(mesh)
    ranks, config = mesh.size(), model.config
    refuse_on_slices(model, ranks)
    guard_dropout(model, ranks)
    expect_same_batches(model, mesh.get_group())
    if config.num_key_value_heads % ranks:
        plan = plan | plan_whole_heads(model, mesh)
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    apply_plan(model, mesh, plan)
    sum_head_norm_grads(model, mesh.get_group())
    if tied:  # the plan gave each of them a shard of its own
        head.weight = embedding.weight
    model.loss_function = split_loss
    model.register_forward_hook(with_full_logits(full_logits), with_kwargs=True)
    return model


class WholeHeads(ParallelStyle):
    """For a projection to heads (dim 0) or from heads (dim 1), if K is no multiple of the ranks.

    DTensor deals out rows in equal chunks and would cut through heads. So the weight is an ordinary
    tensor, this rank's slice, with the same f before it (dim 0) or g after it (dim 1).
    """

    def __init__(self, dim, start, stop, replicas=None):
        self.dim, self.slice, self.replicas = dim, (start, stop), replicas

    def _apply(self, module, mesh):
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:  # all have rank 0's, as of the weights that DTensor deals out
                dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)
        keep_shard(module, self.dim, *self.slice)

        def f(module, args):
            return args[0].to_local(grad_placements=[Partial()])

        def g(module, args, y):
            return all_reduce_to_local(DTensor.from_local(y, mesh, [Partial()]))

        if self.dim == 0:
            module.register_forward_pre_hook(f)
        else:
            module.register_forward_hook(g)
            if mesh.get_local_rank() != 0:
                module.bias = None  # the bias must enter the sum over ranks once
        if self.replicas:
            module.__class__ = ReplicatedKVLinear
            module.get_kv_replica_group = getter(self.replicas)
        return module


def plan_whole_heads(model, mesh):
    """Return the plan of this rank's four projections; set each layer's GQA ratio, too."""
    config, D = model.config, model.model.layers[0].self_attn.head_dim
    kv_heads, group, shared = config.num_key_value_heads, mesh.get_group(), None
    queries, keys, replicas = shard_heads(
        config.num_attention_heads, kv_heads, mesh.size(), mesh.get_local_rank()
    )
    if mesh.size() > kv_heads:
        shared = subgroup(group, f"of {kv_heads}", *replicas)
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = (queries[1] - queries[0]) // (keys[1] - keys[0])
    queries, keys = ((first * D, stop * D) for first, stop in (queries, keys))
    return {
        "model.layers.*.self_attn.q_proj": WholeHeads(0, *queries),
        "model.layers.*.self_attn.k_proj": WholeHeads(0, *keys, shared),
        "model.layers.*.self_attn.v_proj": WholeHeads(0, *keys, shared),
        "model.layers.*.self_attn.o_proj": WholeHeads(1, *queries),
    }


def split_loss(
    logits,
    labels,
    vocab_size,
    ignore_index=-100,
    num_items_in_batch=None,
    shift_labels=None,
    **kwargs,
):
    """Return the mean next-token loss of DTensor logits (B, S, V), split over the vocabulary.

    It takes the place of Hugging Face's loss, with the same arguments; labels (B, S) are shifted
    here. Within `loss_parallel`, where the backward must run, too, the logits are never made full;
    without `loss_parallel` they are. Raises ValueError and IndexError as `next_tokens` does.
    """
    size = logits.shape[:2]
    targets = next_tokens(labels, size, vocab_size, ignore_index, shift_labels).flatten()
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    full = DTensor.from_local(targets, logits.device_mesh, [Replicate()])
    total = F.cross_entropy(logits, full, ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum()
    # Every rank has the full loss, and starts its backward from the full loss.
    return all_reduce_to_local(total) / (
        count if num_items_in_batch is None else num_items_in_batch
    )


def full_logits(logits):
    """All-gather DTensor logits. What follows is the same on all ranks, and so is its gradient."""
    group = logits.device_mesh.get_group()
    if not logits.is_cuda or dist.get_backend(group) != "gloo":
        return logits.full_tensor(grad_placements=[Replicate()])
    # With gloo, DTensor's all-gather treats CUDA memory as CPU memory (pytorch issue 152645). So
    # each rank's logits, zero outside its slice of the vocabulary, are summed over the ranks.
    own = shard_of(logits)[-1]
    local = F.pad(logits.to_local(), (own.start, logits.shape[-1] - own.stop))
    return reduce_from_region(local, group)


def apply_plan(model, mesh, plan):
    """Run parallelize_module; raise UserError, where it only warns, for names the model lacks."""
    names = [name.split(".") for name, _ in model.named_modules()]
    for pattern in plan:
        parts = pattern.split(".")
        if not any(len(n) == len(parts) and all(map(fnmatch, n, parts)) for n in names):
            raise UserError(f"the plan names {pattern}, which the model does not have")
    parallelize_module(model, mesh, plan)


# ---------------------------------------------------------------- what is shown with it

# What the assignment prints for its demo: the first and the last three outputs and input gradients.
GOLDEN_OUTPUTS = [0.0102, 0.0432, -0.0467, 0.0798, -0.0179, 0.0527]
GOLDEN_INPUT_GRAD = [0.1543, -0.0858, -0.0882, -0.2082, 0.0298, 0.2388]


def show_mlp(run, mesh):
    """Run the assignment's demo: apply the plan's MLP entries to one MLP."""
    from tp_mlp import block_step, make_demo

    plan = {k.removeprefix("model.layers.*."): s for k, s in PLAN.items() if ".mlp" in k}
    parallelize = partial(apply_plan, mesh=mesh, plan=plan)
    reference, block, x = make_demo(run, 1024, 4096, parallelize)
    references = run.references(reference)
    for name, parameter in block.named_parameters():
        of, local = type(parameter.data), local_part(parameter)
        run.print0(
            f"{name=},\ttype={of}\tglobal shape={parameter.shape},\tlocal shape={local.shape}"
        )
    run.check_weights("MLP", block, references)
    expected = run.reference_values(lambda block: block_step(block, x), references)
    results = zip(block_step(block, x), expected, strict=True)
    goldens = {"outputs": GOLDEN_OUTPUTS, "input grad": GOLDEN_INPUT_GRAD}
    for (name, golden), (actual, expected) in zip(goldens.items(), results, strict=True):
        run.show_as_asked("MLP", name, expected[0], actual)
        run.check(f"MLP {name}", [(actual, *expected)])
        run.check_same_bits(f"MLP {name}, same bits on all ranks", actual)
        if run.seed == 1337 and run.dtype != torch.bfloat16:
            run.check_golden(name, actual, golden)
    run.check_gradients("MLP:", block, references)


def main():
    parser = harness.add_model_flags(harness.make_parser(__doc__, model_types=loading.LLAMAS))
    parser.add_argument(
        "--overfit",
        type=harness.positive,
        nargs="?",
        const=60,
        metavar="STEPS",
        help="train on one batch for so many steps; 60 if no number is given; default no training",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Show the assignment's MLP; then run all checks of the model, its text, time and memory."""
    mesh = run.mesh("tp")
    show_mlp(run, mesh)

    def also(prompt, batch, parallel, references):
        room = run.source.config.max_position_embeddings - prompt.shape[1]
        for count in (args.new_tokens, min(4 * args.new_tokens, room)):
            how = f" by .generate, {count}"
            harness.check_continuation(
                run, harness.hf_generate, prompt, count, parallel, references, how
            )
        if args.overfit:
            if run.world_size == 1:
                run.announce("one device: one batch is overfitted")
            harness.check_overfitting(run, parallel, references, batch, args.overfit)

    with loss_parallel():
        harness.show_model(
            run, harness.Workload.of(args), partial(dtensor_parallelize, mesh=mesh), also=also
        )


if __name__ == "__main__":
    main()
