"""From a neighbouring tutorial: pretraining a Llama on a mesh, data parallel x tensor parallel.

The mesh has P = dp x tp ranks. The ranks of a row share a model, split by a DTensor plan; the ranks
of a column train the same part of the model, on different texts. Along tp, hidden states between
blocks, which Task 3's plan keeps full, are split by tokens (Megatron's sequence parallelism, arXiv
2205.05198). Here is what both plans hold and send (forward; backward):

                            Task 3's plan               this plan
    norms, residual stream  (B, S, H), on each rank     (B, S/tp, H)
    into a block            f: nothing; all-reduce      all-gather of tokens; reduce-scatter
    out of a block          g: all-reduce; nothing      reduce-scatter of tokens; all-gather
    a norm's gradient       equal on all ranks          a sum over the ranks' tokens

An all-reduce is a reduce-scatter and an all-gather, so both plans send equally many bytes, except
for norms' gradients. Logits and their cross-entropy (`loss_parallel`) stay split over the
vocabulary. Along dp, FSDP2 splits each tensor once more (as in `data_parallel.py`), or each is
copied (`--replicate`).

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 tasks/pretrain_2d.py --dp 2 --tp 2

compares ten steps with a single-rank run of the unmodified model: losses, gradients, their norms,
learning rates, parameters. `--output-dir DIR` keeps checkpoints, which any other mesh can read.
`--memory-budget` trains on long sequences instead, which may not fit on a single rank.
"""

import inspect
import math
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import checkpoints
import harness
import loading
from dtensor_llama import COLUMNS, HEADS, Local, VocabularyRows, apply_plan, split_loss
from utils.collectives import all_reduce
from utils.errors import UserError
from utils.gradients import new_gradients, sum_in_place
from utils.llama import HEAD_NORMS, bind, expect_same_batches, guard_dropout, window_of
from utils.partition import shard_range
from utils.shards import has_labels, refuse_on_slices

# ---------------------------------------------------------------- the technique: the plan

TOKENS, WHOLE = Shard(1), Replicate()  # placements of hidden states (B, S, H)


def scatter_tokens(total):
    """Add up a Partial DTensor over the ranks; each rank gets its own tokens of the sum."""
    return total.redistribute(placements=[TOKENS]).to_local(grad_placements=[TOKENS])


class ScatteredRows(VocabularyRows):
    """Task 3's embedding, whose sum gives each rank its tokens: (B, S) -> (B, S/tp, H)."""

    sum = staticmethod(scatter_tokens)


class TakeHeads(ColwiseParallel):
    """For columns that cut through heads: gathers all outputs, and takes this rank's heads.

    heads: indices of heads, of D columns each; a KV head once for each query head that needs it.
    """

    def __init__(self, heads, D):
        super().__init__(output_layouts=WHOLE, use_local_output=False)
        self.heads, self.D = heads, D

    def _apply(self, module, mesh):
        def take(module, args, y):
            full = y.to_local(grad_placements=[Partial()])  # gradients of all ranks' heads add up
            return full.unflatten(-1, (-1, self.D))[..., self.heads, :].flatten(-2)

        module = super()._apply(module, mesh)
        module.register_forward_hook(take)
        return module


class PutHeads(RowwiseParallel):
    """o_proj for uneven heads: its input is a Partial sum, zero outside of this rank's heads."""

    def __init__(self, *pad):  # how many columns other ranks' heads have, before and after
        super().__init__(input_layouts=Partial(), output_layouts=TOKENS)
        self.pad = pad

    def _apply(self, module, mesh):
        module = super()._apply(module, mesh)
        module.register_forward_pre_hook(lambda _, x: (F.pad(x[0], self.pad),), prepend=True)
        return module


GATHER = PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(WHOLE,))
GATHER_KEYWORD = PrepareModuleInput(
    input_kwarg_layouts={"hidden_states": TOKENS},
    desired_input_kwarg_layouts={"hidden_states": WHOLE},
)
SCATTER = Local(RowwiseParallel(output_layouts=TOKENS, use_local_output=False), grad=TOKENS)

PLAN = {
    "model.embed_tokens": ScatteredRows(),  # (V/tp, H)
    "model.layers.*.input_layernorm": SequenceParallel(),  # (H,)
    "model.layers.*.self_attn": GATHER_KEYWORD,
    "model.layers.*.self_attn.q_proj": HEADS,  # (N/tp D, H)
    "model.layers.*.self_attn.k_proj": HEADS,  # (K/tp D, H)
    "model.layers.*.self_attn.v_proj": HEADS,  # (K/tp D, H)
    "model.layers.*.self_attn.o_proj": SCATTER,  # (H, N/tp D)
    "model.layers.*.post_attention_layernorm": SequenceParallel(),  # (H,)
    "model.layers.*.mlp": GATHER,
    "model.layers.*.mlp.gate_proj": COLUMNS,  # (F/tp, H)
    "model.layers.*.mlp.up_proj": COLUMNS,  # (F/tp, H)
    "model.layers.*.mlp.down_proj": SCATTER,  # (H, F/tp)
    "model.norm": SequenceParallel(),  # (H,)
    "lm_head": ColwiseParallel(input_layouts=TOKENS, use_local_output=False),  # (V/tp, H)
}


def plan_uneven_heads(model, ranks, rank):
    """Return plan entries for heads that are no multiple of the ranks; set the layers' GQA ratio.
    Raises UserError for more ranks than query heads.
    """
    N, K = model.config.num_attention_heads, model.config.num_key_value_heads
    D = model.model.layers[0].self_attn.head_dim
    attention, plan = "model.layers.*.self_attn", {}
    if ranks > N:
        raise UserError(f"--tp {ranks}: the model has {N} query heads")
    if K % ranks == 0:
        return plan
    first, stop = shard_range(N, ranks, rank)
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = 1
    for name in "k_proj", "v_proj":
        plan[f"{attention}.{name}"] = TakeHeads([h * K // N for h in range(first, stop)], D)
    if N % ranks:
        plan[f"{attention}.q_proj"] = TakeHeads(list(range(first, stop)), D)
        plan[f"{attention}.o_proj"] = PutHeads(first * D, (N - stop) * D)
    return plan


def parallelize_2d(model, mesh, replicate=False):
    """Split a LlamaForCausalLM in place, over a mesh of the axes "dp" and "tp".

    The plan splits it over tp, and FSDP2 over dp, unless dp is 1 or `replicate` is set. The model
    may also be on the meta device. Its forward takes full ids (B, S) and gives logits that are
    DTensors, split over the vocabulary. That forward raises ValueError as `prepare_full_sequence`
    does, and for labels, which `forward_backward` takes.
    Raises UserError for ranks along tp without query heads or vocabulary entries, ValueError for a
    model that is split already, or has norms of heads or, with tp > 1, a sliding window, and for
    ranks that do not ascend along an axis.
    """
    if window_of(model.config) and mesh["tp"].size() > 1:
        raise ValueError("a sliding window: not in this plan, whose layers get no mask")
    if HEAD_NORMS & dict(model.model.layers[0].self_attn.named_children()).keys():
        raise ValueError("norms of heads: not in this plan, whose parameters are all DTensors")
    from guards.refusals import refuse_order

    refuse_order(mesh)
    refuse_on_slices(model)
    guard_dropout(model, mesh["tp"].size())
    expect_same_batches(model, mesh["tp"].get_group())
    tp, head, base = mesh["tp"], model.lm_head, model.model
    tied = head.weight is base.embed_tokens.weight
    apply_plan(model, tp, PLAN | plan_uneven_heads(model, tp.size(), tp.get_local_rank()))
    if tied:  # the plan gave each of them a shard of its own
        head.weight = base.embed_tokens.weight
    base.register_forward_pre_hook(bind(prepare_full_sequence, ranks=tp.size()), with_kwargs=True)
    model.register_forward_pre_hook(refuse_labels, with_kwargs=True)
    if mesh["dp"].size() > 1 and not replicate:
        # A tied embedding and the head must be in one unit, else they are no longer tied.
        for unit in [*base.layers, *([] if tied else [base]), model]:
            fully_shard(unit, mesh=mesh["dp"])
    return model


def prepare_full_sequence(base, args, kwargs, ranks):
    """Give a LlamaModel its positions, as a pre-hook; refuse all but plain causal attention.

    Hugging Face makes positions and masks by the shape of the embeddings, and here they are of a
    rank's own tokens. Raises ValueError for tokens that are no multiple of the ranks along tp, a
    mask with padding, packed documents, embeddings as input, a KV cache, and eager or flex
    attention.
    """
    given = inspect.signature(base.forward).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})  # those without a name in the signature
    ids, mask, positions = map(given.get, ("input_ids", "attention_mask", "position_ids"))
    for name in "inputs_embeds", "past_key_values", "cache":
        if given.get(name) is not None:
            raise ValueError(f"{name}: not where each rank has its own tokens")
    if ids.shape[1] % ranks:
        raise ValueError(f"{ids.shape[1]} tokens do not divide by {ranks} ranks of tp")
    if mask is not None and not (mask.dim() == 2 and mask.all()):
        raise ValueError("attention_mask: pad on the right without one, with labels of -100")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    elif (positions.diff() != 1).any():
        raise ValueError("position_ids that jump: not where each rank has its own tokens")
    if base.config._attn_implementation in ("eager", "flex_attention"):  # they need a mask
        raise ValueError(f"{base.config._attn_implementation} attention: use sdpa")
    return (), given | {"attention_mask": None, "position_ids": positions}


def refuse_labels(model, args, kwargs):
    """Raise ValueError, as a pre-hook, for labels."""
    if has_labels(model, args, kwargs):
        raise ValueError("labels: give them to forward_backward or loss_of of pretrain_2d.py")


# ---------------------------------------------------------------- the technique: step and loop


def loss_of(model, batch, mesh):
    """Return this rank's part of the mean loss over all labels along dp, and the number of labels.

    batch: ids and labels, (B/dp, S) each; labels are -100 at padding, which is on the right, where
    no other token sees it. Run it within `loss_parallel`, and its backward, too.
    """
    ids, labels = batch
    count = all_reduce((labels[:, 1:] != -100).sum(), mesh["dp"].get_group())
    logits = model(input_ids=ids, use_cache=False).logits
    return split_loss(logits, labels, model.config.vocab_size, num_items_in_batch=count), count


def forward_backward(model, batch, mesh):
    """Run forward and backward; return the mean loss over the labels of all ranks, on each rank.

    Gradients of microbatches accumulate: each call sums over ranks only those it has made.
    """
    dp = mesh["dp"]
    replicate = dp.size() > 1 and not isinstance(model, FSDPModule)
    part, _ = loss_of(model, batch, mesh)
    with new_gradients(model.parameters()):
        (part if replicate else dp.size() * part).backward()  # FSDP2 averages over dp
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for parameter in trained:
            # A norm's gradient is Partial: each rank along tp has seen its own tokens.
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if replicate:
            local_grads = [parameter.grad.to_local() for parameter in trained]
            sum_in_place(local_grads, dp.get_group())
    return all_reduce(part.detach(), dp.get_group())


def learning_rate(step, steps, warm_up):
    """Return a step's share of the largest rate: from a tenth up to 1, then a cosine down to 0."""
    if step < warm_up:
        return 0.1 + 0.9 * step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def make_optimizer(model, lr, steps, warm_up):
    """Return AdamW, whose states are split as the parameters are, and its rate's schedule."""
    settings = dict(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr, **settings)
    return optimizer, LambdaLR(optimizer, partial(learning_rate, steps=steps, warm_up=warm_up))


def train(model, mesh, batches, optimizer, schedule, clip=1.0):
    """Take a step with each batch; yield its loss, the norm of all gradients, and the rate.

    The norm is over both axes, before clipping. All three are the same on all ranks.
    """
    for batch in batches:
        optimizer.zero_grad()
        if isinstance(model, FSDPModule):
            model.unshard(async_op=True)  # gathered while the labels are counted
        loss = forward_backward(model, batch, mesh)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        (rate,) = schedule.get_last_lr()
        optimizer.step()
        schedule.step()
        yield loss.item(), norm.full_tensor().item(), rate


@torch.no_grad()
def evaluate(model, mesh, batches):
    """Return the mean loss over all labels of all ranks' batches."""
    total = count = 0
    for batch in batches:
        part, labels = loss_of(model, batch, mesh)
        total, count = total + part.double() * labels, count + labels
    if isinstance(model, FSDPModule):
        model.reshard()  # else what is not in a layer stays unsharded until a backward
    return (all_reduce(total, mesh["dp"].get_group()) / count).item()


# ---------------------------------------------------------------- the technique: each rank's texts


class BatchIndices:
    """Yields, for each step from `first` on, the indices of this rank's rows: epoch after epoch.

    sampler: the rank's indices of one epoch, in order. So a step's number says which rows it takes,
    and a resumed run reads no row of the steps before.
    """

    def __init__(self, sampler, size, first):
        self.sampler, self.size, self.first = sampler, size, first

    def __iter__(self):
        epoch = BatchSampler(self.sampler, self.size, drop_last=True)
        return islice(chain.from_iterable(repeat(epoch)), self.first % len(epoch), None)


def make_batches(rows, mesh, batch_size, device, first=0, num_workers=0):
    """Yield this rank's share of each batch of `batch_size` rows, from step `first` on, for ever.

    The sampler deals over dp: the ranks along tp share one model, and must see the same texts.
    num_workers: processes of this rank that read and tokenize up to four batches each ahead. On a
    GPU batches are copied from pinned memory, while the GPU computes.
    """
    P, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    sampler = DistributedSampler(rows, P, rank, shuffle=False, drop_last=True)
    indices, on_gpu = BatchIndices(sampler, batch_size // P, first), device.type == "cuda"
    ahead = {"prefetch_factor": 4, "worker_init_fn": loading.start_worker} if num_workers else {}
    loader = DataLoader(
        rows, batch_sampler=indices, num_workers=num_workers, pin_memory=on_gpu, **ahead
    )
    for batch in loading.batches_of(loader):
        yield [tensor.to(device, non_blocking=on_gpu) for tensor in batch]


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add("--dp", type=harness.positive, help="rows of the mesh; default the ranks / tp")
    add(
        "--tp",
        type=harness.positive,
        help="columns; default the ranks / dp, or 2 of an even number",
    )
    add("--replicate", action="store_true", help="copies along dp, in place of FSDP2; default no")
    add(
        "--text",
        help='documents: the paragraphs of a file or URL, or each "text" of a file of '
        "JSON lines; a file is not held in memory; default the project's stories",
    )
    add("--tokenizer", help="tokenizer.json or its folder; default the embedded model's")
    add(
        "--train-tokenizer",
        type=harness.positive,
        metavar="VOCABULARY_SIZE",
        help="train one of so many "
        "tokens on the text, byte-level BPE, if --tokenizer has none yet; default no",
    )
    add(
        "--num-workers",
        type=harness.natural,
        default=0,
        help="processes of each rank that read and "
        "tokenize batches ahead; default 0: none, the rank itself does",
    )
    add(
        "--num-documents",
        type=harness.positive,
        help="a tenth is held out; default all, or 240 stories",
    )
    add("--batch-size", type=harness.positive, default=12, help="documents a step; default 12")
    add(
        "--seq-len",
        type=harness.positive,
        default=56,
        help="tokens of a document at most; default 56",
    )
    length = parser.add_mutually_exclusive_group().add_argument
    length("--steps", type=harness.positive, default=12, help="of training; default 12")
    length(
        "--epochs",
        type=harness.positive,
        help="train so often on each document; default by --steps",
    )
    add("--warm-up", type=harness.natural, default=4, help="steps with a smaller rate; default 4")
    add("--lr", type=harness.rate, default=1e-3, help="AdamW's largest learning rate; default 1e-3")
    add("--output-dir", type=Path, help="for checkpoints, and model/ at the end; default none")
    add("--save-every", type=harness.positive, default=100, help="steps; default 100")
    add("--resume", action="store_true", help="go on there, by the same flags; default no")
    add(
        "--memory-budget",
        type=harness.gib,
        metavar="GIB",
        help="train on one batch of --batch-size x --seq-len tokens instead, each rank with so "
        "much memory beyond its weights; default none",
    )
    harness.add_compile_flag(parser)
    args = parser.parse_args()
    of_texts = "text", "tokenizer", "train_tokenizer", "num_documents", "epochs", "output_dir"
    if args.memory_budget:
        for name in of_texts:
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                harness.fail(f"--memory-budget trains on one batch, and keeps nothing: no {flag}")
    harness.start(args, show)


def show(run, args):
    """Run all checks of the first steps, and train."""
    store = checkpoints.ShardedCheckpoints(run, args.output_dir, "model", args.resume)
    mesh, B = harness.make_mesh(run, args.dp, args.tp, args.batch_size), args.batch_size
    tp = mesh["tp"].size()
    S = -(-args.seq_len // tp) * tp  # equally many tokens on each rank
    if args.memory_budget:
        return train_within(run, args, mesh, S)
    text, of_tokens = (args.text, args.num_documents), (args.tokenizer, args.train_tokenizer)
    tokenizer, rows, held = loading.load_rows(run, *text, S, B, *of_tokens)
    args.steps = harness.number_of_steps(run, args, rows)
    run.source.from_scratch(tokenizer)
    store.find(harness.identity_of_pretraining(run, args, rows))
    trial = harness.ReferenceTraining(run, rows, args)
    model = load_split(run, args, mesh, trial)
    with loss_parallel():
        batches = partial(make_batches, mesh=mesh, batch_size=B, device=run.device)
        step = partial(forward_backward, model, next(batches(rows)), mesh)
        trial.check_first_step(run, model, step)

        def loss_held_out(count):
            return evaluate(model, mesh, islice(batches(held), count))

        trial.check_held_out(run, loss_held_out, held)
        optimizer, schedule = make_optimizer(model, args.lr, args.steps, args.warm_up)
        losses = store.resume(model, optimizer, schedule)
        left = batches(rows, first=len(losses), num_workers=args.num_workers)
        left = islice(left, args.steps - len(losses))
        training = train(model, mesh, left, optimizer, schedule)
        save = partial(store.save, model, optimizer, schedule)
        training = harness.saving(training, losses, args, save)
        trial.check_steps(run, model, training, losses, store)
        harness.progress(run, trial, model, training, losses, B * S)
        loss = loss_held_out(len(held) // B)
        harness.say_what_was_learnt(run, loss, rows, held)
        if args.output_dir:
            harness.export(run, model, tokenizer, store, DataLoader(held, B), loss)


def load_split(run, args, mesh, trial):
    """Return the split model; check that its weights are slices of the reference's."""
    model = run.load_model(partial(parallelize_2d, mesh=mesh, replicate=args.replicate))
    model.to(run.device)  # lets FSDP2 register the loaded parameters, which are new tensors
    unsplit = "" if args.replicate and mesh["tp"].size() == 1 else "norm"
    run.check_weights("all", model, trial.references, unsplit=(unsplit,))
    harness.check_fully_split(run, model, mesh["dp"].size() == 1 or args.replicate)
    return model


def train_within(run, args, mesh, S):
    """Train on one batch of long sequences, with no more memory on a rank than --memory-budget.

    Two things are compared with the unmodified model: before the training, all gradients for the
    beginning of each sequence; after it, without the limit, the training's first loss.
    """
    ids, _, _ = harness.make_batch(run, args.batch_size, S)
    few = min(S, 16 * mesh["tp"].size())
    trial = harness.ReferenceTraining(run, [(row[:few], row[:few]) for row in ids], args)
    model = load_split(run, args, mesh, trial)
    first, stop = shard_range(len(ids), mesh["dp"].size(), mesh["dp"].get_local_rank())
    local = ids[first:stop]
    losses = []
    with loss_parallel():
        short = local[:, :few], local[:, :few]
        step = partial(forward_backward, model, short, mesh)
        trial.check_first_step(run, model, step)
        trial.references.clear()
        optimizer, schedule = make_optimizer(model, args.lr, args.steps, args.warm_up)
        batches = repeat((local, local), args.steps)
        training = train(model, mesh, batches, optimizer, schedule)
        training = harness.saving(training, losses, args, lambda losses: None)
        with harness.limited_memory(run.device, args.memory_budget):
            harness.progress(run, trial, model, training, losses, ids.numel())
    harness.check_long_loss(run, losses[0], ids)


if __name__ == "__main__":
    main()
