"""Bonus: a Llama whose layers are split over the ranks, a pipeline of stages.

Each rank has some consecutive layers, a stage; the first also the embedding, the last also the LM
head. A batch goes through in microbatches, so that all ranks have work at once: hidden states
(B/m, S, H) travel to the next stage, and in the backward their gradients to the stage before. For
two stages and four microbatches, with F for forward and B for backward:

    GPipe   rank 0   F0 F1 F2 F3 .  .  B3 B2 B1 B0      keeps the activations of m microbatches
            rank 1   .  F0 F1 F2 F3 B3 B2 B1 B0 .       (arXiv 1811.06965, section 2.2)

    1F1B    rank 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3      keeps those of p microbatches at most
            rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .       (PipeDream-Flush, arXiv 2006.09503)

Each of p ranks waits (p-1)/(m+p-1) of the time: the bubble. With one microbatch, which is plain
model parallelism, one rank works at a time.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/pipeline_llama.py

runs both schedules, by hand and by torch.distributed.pipelining (whose GPipe runs the backwards in
the order of the forwards), and PyTorch's interleaved 1F1B and zero bubble (several stages a rank),
each against the unmodified model. With `--model random/gpt2-small-test` the model is a GPT-2.
"""

import copy
import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import checkpoints
import harness
import loading
from utils.collectives import all_reduce, all_reduce_, group_of_axis, subgroup
from utils.errors import UserError
from utils.families import GPT2, LayersInOrder, base_of, embedding_of, family_of, layers_of
from utils.gradients import new_gradients
from utils.llama import check_ids, mixed_in, next_tokens
from utils.losses import token_losses
from utils.partition import shard_range
from utils.point_to_point import receive, send
from utils.stages import balance, clock_cycles, sum_copies

# ---------------------------------------------------------------- the technique: stages


class Stage:
    """Some layers of a model, after `keep_stage`."""

    def forward(self, x, attention_mask=None):
        """Return hidden states (B, S, H), or logits in the last stage.

        x: ids (B, S) in the first stage, else hidden states. attention_mask: (B, S), 0 for padding;
        every stage needs it.
        """
        x = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        base = base_of(self)
        x = base(**x, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.lm_head(x) if self.is_last else x


class GPT2Stage(Stage):
    """A `Stage` of a GPT-2."""

    def forward(self, x, attention_mask=None):
        """Run `Stage.forward`, and copy: GPT-2's output is a view, which zero bubble refuses."""
        y = super().forward(x, attention_mask)
        return y if self.is_last else y.clone()


class NoPositions(nn.Module):
    """Adds nothing, in place of GPT-2's embedding of positions, which the first stage adds."""

    def forward(self, positions):
        return torch.zeros((), device=positions.device)


def keep_stage(model, stops, index):
    """Make stage `index` of a LlamaForCausalLM or a GPT2LMHeadModel, in place.

    stops: for each stage, the layer before which it ends. The modules that are left keep their
    names. The model may also be on the meta device, so that a rank only ever loads its own
    layers. Where the LM head is tied to the embedding, the last stage keeps the embedding, too.
    Raises ValueError for stops that leave out layers.
    """
    from guards.refusals import check_stops

    family, base, layers = family_of(model), base_of(model), layers_of(model)
    check_stops(stops, len(layers))
    first, stop = (0, *stops)[index], stops[index]
    tied = model.lm_head.weight is embedding_of(model).weight
    local = LayersInOrder()
    for i in range(first, stop):
        local.add_module(str(i), layers[i])
    setattr(base, family.layers, local)
    model.original_settings = model.config, model.generation_config
    model.config = base.config = copy.deepcopy(model.config)
    base.config.num_hidden_layers = stop - first
    if getattr(base.config, "layer_types", None):  # which layers have a sliding window
        base.config.layer_types = base.config.layer_types[first:stop]
    model.__class__ = mixed_in(GPT2Stage if family is GPT2 else Stage, type(model))
    model.index, model.is_first, model.is_last = index, index == 0, index == len(stops) - 1
    model.tied = tied
    if not model.is_first and not (model.is_last and tied):
        setattr(base, family.embedding, None)
    if not model.is_first and family is GPT2:
        base.wpe, base.drop = NoPositions(), nn.Identity()
    if not model.is_last:
        setattr(base, family.norm, nn.Identity())
        model.lm_head = None


def sum_tied(stages, ends):
    """Give both copies of a tied embedding the sum of their gradients, in place.

    stages: those of this rank. ends: the process group of the first and the last rank. A frozen
    copy takes part with zeros: the other rank does not know that it is frozen, and waits for it.
    """
    weights = tied_weights(stages)
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    if len(weights) == 2:  # both on one rank
        sum_copies(*weights)
    elif weights:
        all_reduce_(weights[0].grad, ends)
    for weight in weights:
        if not weight.requires_grad:
            weight.grad = None


def tied_weights(stages):
    """List the copies of a tied embedding that these stages have."""
    return [embedding_of(stage).weight for stage in stages if embedding_of(stage)]


# ---------------------------------------------------------------- the technique: schedules


def gpipe(num_batches, num_partitions, stage):
    """List what a stage does: ("F" or "B", microbatch). Backwards run in reverse order."""
    ticks = itertools.chain.from_iterable(clock_cycles(num_batches, num_partitions))
    forward = [("F", i) for i, j in ticks if j == stage]
    return forward + [("B", i) for _, i in reversed(forward)]


def one_forward_one_backward(num_batches, num_partitions, stage):
    """List what a stage does in 1F1B: each backward as soon as possible.

    So a stage keeps p - stage microbatches at most.
    """
    ahead = num_partitions - stage
    order = [("F", i) for i in range(min(ahead, num_batches))]
    for i in range(num_batches):
        order += [("B", i), ("F", i + ahead)] if i + ahead < num_batches else [("B", i)]
    return order


def run_by_hand(stage, order, batch, loss, down, up):
    """Run forwards and backwards of this rank's stage, in the given order.

    batch: the (ids, mask, labels) of each microbatch, on all ranks. loss(logits, labels): the loss
    of a microbatch. down, up: two process groups of all ranks each, down for hidden states, up for
    their gradients, used in turns from stage to stage. (NCCL runs all that a rank sends and
    receives in a group in call order: in fewer groups a message would wait for one that comes
    later.) Returns the microbatches' losses and all logits in the last stage, else [] and None.
    """
    rank = stage.index
    before, after = (rank - 1) % 2, rank % 2  # which of two groups, to the stages before and after
    like = next(stage.parameters())
    kept = {}
    sent, losses, logits = [], [], []

    def shapes(direction):
        return [(*batch[i][0].shape, stage.config.hidden_size) for k, i in order if k == direction]

    # (The first stage never reads `hidden`, the last one never `grads`.)
    hidden = receive(rank - 1, down[before], shapes("F"), like)
    grads = receive(rank + 1, up[after], shapes("B"), like)
    for direction, i in order:
        if direction == "F":
            ids, mask, labels = batch[i]
            x = ids if stage.is_first else next(hidden).requires_grad_()
            y = stage(x, mask)
            if stage.is_last:
                logits.append(y.detach())
                y = loss(y, labels)
                losses.append(y.detach())
            else:
                sent.append(send(y.detach(), rank + 1, down[after]))
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            dy = None if stage.is_last else next(grads)
            if y.requires_grad:  # a first stage that is frozen has no gradients
                y.backward(dy)
            if not stage.is_first:
                sent.append(send(x.grad, rank - 1, up[before]))
        sent = [pair for pair in sent if not pair[0].is_completed()]
    for work, _ in sent:
        work.wait()
    return losses, torch.cat(logits) if logits else None


BY_HAND = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
BY_TORCH = {
    "torch-gpipe": pipelining.ScheduleGPipe,
    "torch-1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
SEVERAL = "interleaved", "zero-bubble"  # schedules of several stages on each rank
KEPT = 8  # how many of PyTorch's schedules: one for each shape of a batch, each with buffers


class Pipeline:
    """A Llama or a GPT-2 in stages over the ranks of a mesh of one axis; stage s is on rank s % P.

    schedule: a key of BY_HAND or BY_TORCH. stages: those of this rank, out of `number` in all.
    """

    def __init__(self, mesh, schedule, stages, number):
        self.group, self.schedule, self.stages = group_of_axis(mesh), schedule, stages
        self.number, self.rank, self.ranks = number, self.group.rank(), self.group.size()
        self.is_last, self.made = self.rank == self.ranks - 1, {}
        names = ("down", "down 2"), ("up", "up 2")  # see `run_by_hand`
        self.down, self.up = [
            [subgroup(self.group, name, 0, self.ranks) for name in both] for both in names
        ]
        ends = 0, self.ranks, max(1, self.ranks - 1)  # [0:P:P-1]: the first and the last rank
        if 0 < self.rank < self.ranks - 1:
            ends = self.rank, self.rank + 1  # NCCL wants every rank to make a group
        self.ends = subgroup(self.group, "ends", *ends)

    def __deepcopy__(self, memo):
        """Copy the stages; keep the process groups."""
        new = copy.copy(self)
        new.stages, new.made = copy.deepcopy(self.stages, memo), {}
        return new

    def named_parameters(self):
        return [pair for stage in self.stages for pair in stage.named_parameters()]

    def step(self, ids, mask, labels, sizes):
        """Run forward and backward of a batch, in microbatches of `sizes` sequences.

        ids, mask, labels: (B, S) each. The loss is the mean over all labels of the batch, not a
        mean of the microbatches' means. Its gradients are added to the parameters' .grad. Returns
        the loss and the logits (B, S, V) on the last rank, else 0 and None. Only schedules by
        hand take unequal sizes. Raises, on all ranks, IndexError for ids and labels outside the
        vocabulary, and ValueError for shapes and sizes that do not fit, in zero-bubble for a frozen
        first stage, and under torch.no_grad().
        """
        if not torch.is_grad_enabled():
            raise ValueError("a step runs a backward: not under torch.no_grad()")
        if not sizes or min(sizes) < 1 or sum(sizes) != len(ids):
            raise ValueError(f"microbatches of {sizes}: each 1 or more, {len(ids)} in all")
        if self.schedule in BY_TORCH and len(set(sizes)) > 1:
            raise ValueError(f"microbatches of unequal size, {sizes}: not by {self.schedule}")
        if mask.shape != ids.shape:
            raise ValueError(f"a mask of {list(mask.shape)}, for ids of {list(ids.shape)}")
        trains = self.stages_that_train(ids.device) if self.schedule in BY_TORCH else ()
        if self.schedule == "zero-bubble" and not trains[0]:
            raise ValueError(
                "zero-bubble: nothing of the first stage is trained, and PyTorch's schedule leaves "
                "out the gradients after it: take interleaved"
            )
        vocab_size = self.stages[0].config.vocab_size
        check_ids(ids, vocab_size)
        next_tokens(labels, ids.shape, vocab_size)
        self.count = (labels[:, 1:] != -100).sum()
        tied = self.stages[0].tied and self.number > 1
        # Only this step's gradient is summed over the two ranks, not what earlier steps left there.
        with new_gradients(tied_weights(self.stages) if tied else []):
            losses, logits = self.run(ids, mask, labels, sizes, trains)
            if tied:
                sum_tied(self.stages, self.ends)
        return sum(one.detach() for one in losses), logits

    def stages_that_train(self, device):
        """Return for each stage, on all ranks, whether (1.0 or 0.0) any of its parameters train."""
        trains = torch.zeros(self.number, device=device)
        for stage in self.stages:
            trains[stage.index] = any(p.requires_grad for p in stage.parameters())
        return tuple(all_reduce(trains, self.group).tolist())

    def run(self, ids, mask, labels, sizes, trains):
        """Run the schedule; return losses and logits as `run_by_hand` does."""
        if self.schedule in BY_HAND:
            order = BY_HAND[self.schedule](len(sizes), self.ranks, self.rank)
            pieces = zip(*(tensor.split(sizes) for tensor in (ids, mask, labels)), strict=True)
            both = self.down, self.up
            return run_by_hand(self.stages[0], order, list(pieces), self.loss, *both)
        key, losses = (len(sizes), ids.shape, trains), []
        if key not in self.made:  # a schedule of PyTorch's fixes in its first step what is sent
            if len(self.made) == KEPT:
                del self.made[next(iter(self.made))]
            self.made[key] = self.schedule_of_torch(len(sizes), ids.device)
        given = {"target": labels, "losses": losses} if self.is_last else {}
        inputs = [ids] if self.rank == 0 else []
        logits = self.made[key].step(*inputs, attention_mask=mask, **given)
        return losses, logits

    def loss(self, logits, labels):
        return token_losses(logits, labels).sum() / self.count

    def schedule_of_torch(self, num_batches, device):
        stages = [
            pipelining.PipelineStage(stage, stage.index, self.number, device, group=self.group)
            for stage in self.stages
        ]
        stages = stages if self.schedule in SEVERAL else stages[0]
        return BY_TORCH[self.schedule](stages, num_batches, loss_fn=self.loss, scale_grads=False)


# ---------------------------------------------------------------- what is shown with it


def reason_against(run, name, number, layers, sizes):
    """Return why a schedule cannot be run, or None."""
    m, P = len(sizes), run.world_size
    if number > layers:
        return f"{number} stages, but only {layers} layers"
    if name in BY_TORCH and len(set(sizes)) > 1:
        return f"microbatches of unequal size, {sizes}"
    if name == "torch-1f1b" and m < P:
        return f"{m} microbatches, fewer than {P} stages, which PyTorch's 1F1B does not take"
    if name in SEVERAL and m % max(1, m // P):
        return f"{m} microbatches do not divide into {m // P} equal rounds"
    if name in BY_TORCH and run.device.type == "cuda" and dist.get_backend() == "gloo":
        return "PyTorch sends what is on a GPU by NCCL only"
    return None


def load_stages(run, costs, number):
    """Load this rank's stages, out of `number` in all, which cost about the same."""
    stops, local = balance(costs, number), range(run.rank, number, run.world_size)
    run.print0(f"note: {number} stages, which end before layers {', '.join(map(str, stops))}")
    return [run.load_model(partial(keep_stage, stops=stops, index=i)) for i in local]


def train(run, mesh, costs, batch):
    """Take three steps of Adam, also with a model that fits on no single rank."""
    stages, losses = load_stages(run, costs, run.world_size), []
    pipe = Pipeline(mesh, "1f1b", stages, run.world_size)
    optimizer = torch.optim.Adam(stages[0].parameters(), lr=1e-4)
    before = checkpoints.fingerprint(stages[0].parameters())
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(harness.sum_of_parts(run, pipe.step(*batch)[0]).item())
        optimizer.step()
    run.print0(f"losses: {', '.join(f'{loss:.4f}' for loss in losses)}")
    run.check("last loss, below the first", [torch.tensor([[losses[-1] < losses[0]], [1.0]])], 0.0)
    changed = float(checkpoints.fingerprint(stages[0].parameters()) != before)
    run.check("each rank's stage, changed by the training", [torch.tensor([[changed], [1.0]])], 0.0)


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMA_AND_GPT2)
    add, names = parser.add_argument, [*BY_HAND, *BY_TORCH]
    add("--schedule", choices=["all", *names], default="all", help="default all of them")
    add("--batch-size", type=harness.positive, default=8, help="sequences in a batch; default 8")
    add("--microbatches", type=harness.positive, default=4, help="pieces of a batch; default 4")
    add("--stages-per-rank", type=harness.positive, default=2, help="in the last two; default 2")
    add("--seq-len", type=harness.positive, default=64, help="tokens a sequence; default 64")
    add(
        "--memory-budget",
        type=harness.gib,
        metavar="GIB",
        help="in place of the checks: train in 1F1B by "
        "hand, each rank with so much memory beyond what it has; default none",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Run all checks of each schedule."""
    run.mark = "P"
    B, S, m = args.batch_size, args.seq_len, args.microbatches
    loaded = {}
    if m > B:
        raise UserError(f"--batch-size {B}: fewer sequences than --microbatches {m}")
    if m < run.world_size:
        run.print0(f"note: {m} microbatches, fewer than {run.world_size} ranks: some always wait")
    mesh = run.mesh("pp")
    batch = harness.make_batch(run, B, S)
    costs = harness.measure_costs(run, S)
    equal = [stop - first for first, stop in (shard_range(B, m, i) for i in range(m))]
    if args.memory_budget:
        with harness.limited_memory(run.device, args.memory_budget):
            return train(run, mesh, costs, [*batch, equal])
    reference = harness.Reference(run, batch)
    for name in [*BY_HAND, *BY_TORCH] if args.schedule == "all" else [args.schedule]:
        number = run.world_size * (args.stages_per_rank if name in SEVERAL else 1)
        if reason := reason_against(run, name, number, len(costs), equal):
            if args.schedule != "all" or name == "gpipe":  # if gpipe cannot run, none can
                raise UserError(f"{name}: {reason}")
            run.print0(f"note: not {name}: {reason}")
            continue
        stages = loaded[number] = loaded.get(number) or load_stages(run, costs, number)
        pipe, sizes = Pipeline(mesh, name, stages, number), equal
        if name in BY_HAND and m > 1 and equal[-1] > 1:  # by hand sizes may differ
            sizes = [equal[0] + 1, *equal[1:-1], equal[-1] - 1]
        run.check_weights(name, pipe, reference.models, unsplit=("",))
        embedding = embedding_of(pipe.stages[0]) if run.rank == 0 else None
        reference.check_step(run, name, pipe, partial(pipe.step, *batch, sizes), embedding)


if __name__ == "__main__":
    main()
