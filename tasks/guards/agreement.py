"""What must be the same on ranks that share each batch. Nothing else would notice a difference.

Ranks compare in a model's forwards, because all ranks run these: in the first in training and the
first in evaluation, and in the 1st, 2nd, 4th, 8th, ... of all. So messages are few, and no rank
waits for one that does not come. What optimizers and clipping do between forwards is noted, and
compared in the next of these forwards. All ranks of a group raise together. Shapes as in
`utils/__init__.py`.
"""

import hashlib
import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from utils.collectives import all_gather
from utils.full_model import norm_of
from utils.gradients import local_part, ranks_in_mesh
from utils.llama import PROMPTED, Guard
from utils.shards import is_slice, shard_of

ENDS = 32  # how many numbers at each end of a weight are compared
UNLIKE = 1e-2  # beyond this share, a difference between values is more than rounding


@dataclass
class Record:
    """What is known of a model. shapes: of its parameters in a forward, by name."""

    forwards: int = 0
    last: weakref.ref | None = None  # the last forward's first tensor
    modes: set = field(default_factory=set)
    shapes: dict = field(default_factory=dict)
    noted: dict = field(default_factory=lambda: {"clipping": {}, "step": {}})  # {name: a norm}


# Models whose batches several ranks share. In the order of insertion, the same on all ranks.
SHARING_BATCHES = weakref.WeakKeyDictionary()  # {model: Record}; a deep copy has its own
STEPS = weakref.WeakKeyDictionary()  # {optimizer: how many steps}
CALLS = {}  # {what is called, over which ranks: how often}
comparing = True  # see `without_comparing`


@contextmanager
def without_comparing():
    """Compare nothing, as a context: for those who count messages, or time them."""
    global comparing
    before, comparing = comparing, False
    try:
        yield
    finally:
        comparing = before


def is_due(count):
    """Tell whether a count is 1, 2, 4, 8, ..."""
    return count & (count - 1) == 0


def is_due_again(*key):
    """Count a call; tell whether it is the 1st, 2nd, 4th, ..."""
    CALLS[key] = CALLS.get(key, 0) + 1
    return is_due(CALLS[key])


# ---------------------------------------------------------------- in a forward


class BatchGuard(Guard):
    """A pre-hook with keyword arguments, of a model and of its part: check(model, arguments).

    Where tokens are split, a part does not check: it gets a rank's own tokens, after the model did.
    """

    def __call__(self, part, args, kwargs):
        model = self.model() or part
        if torch.compiler.is_compiling() or hasattr(model, "sequence_parts"):
            return
        given = {**dict(enumerate(args)), **kwargs}
        first = next(filter(torch.is_tensor, given.values()), None)
        record = record_of(model)
        if part is model or record.last is None or record.last() is not first:
            self.check(model, given)  # else the part gets what the model got
        record.last = None if first is None else weakref.ref(first)


def record_of(model):
    """Return a model's Record. A deep copy of a model gets a new one in its first forward."""
    return SHARING_BATCHES.setdefault(model, Record())


def share_batches(model):
    """Let a model's forwards call `check_forward`.

    model: not yet split over the last of its `batch_groups`.
    """
    if not hasattr(model, "row_at_split"):  # not split over another axis before
        model.row_at_split = first_row(model.model.layers[0].mlp.down_proj.weight)
        for part in model, model.model:  # PEFT, or a user, may call only one of them with its hooks
            part.register_forward_pre_hook(BatchGuard(model, check_forward), with_kwargs=True)
    # DDP may get this part alone, and so may a user.
    model.model.batch_groups, model.model.row_at_split = model.batch_groups, model.row_at_split
    record_of(model)


def check_forward(model, given):
    """Compare, in some forwards, what ranks that share a batch must have alike.

    Token ids, labels and masks: a sampler for data parallelism gives each rank other rows. Weights:
    see `hash_of_start` and `unlike_weights`. Gradients: see `check_noted`. given: the forward's
    arguments by name. Raises ValueError, on all ranks, for what is unlike.
    """
    tensors = {key: x for key, x in given.items() if type(x) is torch.Tensor}
    if torch.compiler.is_compiling() or not comparing or not tensors or is_capturing():
        return
    if any(x.is_meta for x in tensors.values()):
        return
    record = record_of(model)
    record.forwards += 1
    if not is_due(record.forwards) and model.training in record.modes:
        return
    record.modes.add(model.training)
    # (Masks of S x S are left out: they may be most of the memory.)
    integers = {k: x for k, x in tensors.items() if x.dim() <= 2 and not x.is_floating_point()}
    shapes = [(key, list(x.shape)) for key, x in tensors.items()]
    batch = hash_of([str(shapes), *integers.values()])
    # FSDP1 shows its parts as if they were weights: with it, batches alone are compared.
    fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    parameters = {} if fsdp1 else with_prompt(model)
    record.shapes = {name: p.shape for name, p in parameters.items()}
    start = hash_of_start(model) if parameters and record.forwards == 1 else math.nan
    groups = [get_group() for get_group in model.batch_groups]
    # All messages before any error, or ranks of the next group would wait for those that raised.
    given = model, parameters, batch, start
    errors = [error_in(group, *given) for group in groups if group.size() > 1]
    if any(errors):
        raise ValueError(next(filter(None, errors)))


def error_in(group, model, parameters, batch, start):
    """Compare over the ranks of a group; return what is unlike, in words, or None."""
    ranks = dist.get_process_group_ranks(group)
    alike = weights_alike(parameters, splits_tokens(model, group))
    names = hash_of([str([(name, list(p.shape)) for name, p in alike.items()])])
    batches, starts, all_names = gather_numbers([batch, start, names], group).unbind(1)
    if differ(all_names):
        return f"ranks {ranks} have different models, or adapters"
    unlike, unsummed = unlike_weights(alike, group), check_noted(model, group)
    if differ(batches):
        return (
            f"ranks {ranks} have different batches, and split one model or its tokens: give them "
            "the same, and let a sampler deal out rows to replicas only"
        )
    if differ(starts):
        return (
            f"ranks {ranks} had different weights when the model was split: make it with one seed "
            "on all ranks, or load it"
        )
    if unlike and not unsummed:  # unlike weights would only follow from that
        return (
            f"ranks {ranks} have different values of {unlike}, which each of them has: make the "
            "model, its adapters and its prompt with one seed on all ranks, or load them"
        )
    return unsummed


def differ(numbers):
    """Tell whether numbers of several ranks differ; no, if one is NaN, which cannot be compared."""
    return bool(numbers.isfinite().all()) and len(numbers.unique()) > 1


def hash_of(parts):
    """Return a number, of 48 bits, that stands for texts and tensors, which may be on a GPU."""
    digest = hashlib.sha256()
    for part in parts:
        text = isinstance(part, str)
        digest.update(part.encode() if text else part.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")  # a float64 has 53 bits


# ---------------------------------------------------------------- weights


def first_row(weight):
    """Return a copy, on the CPU, of a full weight's first row; None for any other weight."""
    full = not (weight.is_meta or is_slice(weight) or isinstance(weight, DTensor))
    return weight[0].detach().cpu().clone() if full else None


def hash_of_start(model):
    """Return a number that stands for the weights before the split; NaN if others were loaded.

    If this rank's part of `row_at_split` has changed, weights were loaded after the split.
    """
    layers = getattr(model, "model", model).layers  # of a model, or of the part that is left of it
    weight, row = layers[0].mlp.down_proj.weight, model.row_at_split
    if row is None or weight.is_meta or weight.dim() != 2:
        return math.nan
    (rows, columns), local = shard_of(weight), local_part(weight.detach())
    if rows.start or not len(local) or not local[0].cpu().to(row.dtype).equal(row[columns]):
        return math.nan
    return hash_of([row.double()])


def weights_alike(parameters, of_tokens):
    """Return those of {name: parameter} of which each rank of a group has the same part.

    These are all parameters if the group splits the tokens (of_tokens), else the unsplit ones.
    DTensors are left out: PyTorch made them alike.
    """
    return {
        name: parameter
        for name, parameter in parameters.items()
        # (Where weights are split, rank 0 alone has the biases of row-parallel layers.)
        if of_tokens or not (is_slice(parameter) or name.endswith(".bias"))
        if not isinstance(parameter, DTensor) and not parameter.is_meta
    }


def unlike_weights(named, group):
    """Return the first name of a parameter whose values differ between ranks, or None.

    A parameter's beginning and end stand for it. Ranks may have rounded differently.
    """
    pieces = [torch.zeros(0, dtype=torch.float64)]
    for parameter in named.values():
        flat = local_part(parameter.detach()).reshape(-1)
        pieces.append(torch.cat([flat[:ENDS], flat[-ENDS:]]).to("cpu", torch.float64))
    found = gather_numbers(torch.cat(pieces), group)
    parts = found.split([len(piece) for piece in pieces[1:]], dim=1)
    for name, part in zip(named, parts, strict=True):
        spread = part.amax(0) - part.amin(0)
        if part.numel() and part.isfinite().all() and spread.max() > UNLIKE * part.abs().max():
            return name
    return None


def splits_tokens(model, group):
    """Tell whether the ranks of `group` have a model's tokens split between them."""
    ranks = dist.get_process_group_ranks
    return hasattr(model, "sequence_parts") and ranks(model.get_group()) == ranks(group)


def with_prompt(model):
    """Return {name: parameter} of a model, and of the prompt that PEFT puts in front of it."""
    prompted = PROMPTED.get(model, lambda: None)()
    return dict((prompted or model).named_parameters())


def check_sum(tensors, group):
    """Raise ValueError, on all ranks, where the sum of gradients over a group would be wrong.

    It is wrong over ranks that split the weights: their gradients are right as they are. It is also
    wrong over replicas whose weights differ, which the 1st, 2nd, 4th, ... call looks for.
    """
    if both := ranks_that_split(tensors, group):
        raise ValueError(
            f"sum_gradients over ranks {both}, which split the weights: their gradients are right "
            "as they are; sum over the axis that splits the tokens or the batch, if there is one"
        )
    if (
        not comparing
        or is_capturing()
        or not is_due_again("sums", *dist.get_process_group_ranks(group))
    ):
        return
    named = {i: t for i, t in enumerate(tensors) if isinstance(t, nn.Parameter)}
    unlike = unlike_weights(named, group)
    if unlike is not None:
        shape = list(named[unlike].shape)
        raise ValueError(
            f"ranks {dist.get_process_group_ranks(group)} have different values of parameter "
            f"{unlike}, {shape}: make replicas with one seed on all ranks, or load them"
        )


# ---------------------------------------------------------------- gradients


def note_step(optimizer, parameters):
    """Note the gradients that an optimizer steps with, in its 1st, 2nd, 4th, ... step."""
    STEPS[optimizer] = STEPS.get(optimizer, 0) + 1
    if is_due(STEPS[optimizer]) and not is_capturing():
        note(parameters, "step")


def note_clipping(given):
    """Note gradients that PyTorch clips. given: the arguments of one of its functions.

    If they are a rank's own, each rank clips by another norm; a sum after that would hide it.
    """
    if torch.compiler.is_compiling() or is_capturing() or not is_due_again("clipping"):
        return
    tensors, clips = given["parameters"], 1.0
    if "total_norm" in given:  # where it is small, nothing is clipped: somebody may only look at it
        clips = (torch.as_tensor(given["total_norm"]) > given["max_norm"]).double()
    note([tensors] if torch.is_tensor(tensors) else list(tensors), "clipping", clips)


def note(parameters, before, clips=1.0):
    """Remember norms of gradients that should be the same on ranks that split the tokens.

    before: what is about to be done with them, "clipping" or "step". clips: 0 if clipping would
    change nothing, else 1. (Norms are divided by it, and infinite ones are not compared.)
    """
    known = {id(p) for p in parameters if p.grad is not None}
    for model, record in SHARING_BATCHES.items():
        if not hasattr(model, "sequence_parts"):
            continue
        # FSDP1 shows its parts, of other shapes; FSDP2 has DTensors, and sums by itself.
        named, shapes = with_prompt(model), record.shapes
        seen = {n: p for n, p in named.items() if id(p) in known and p.shape == shapes.get(n)}
        if not seen:  # of another model; this one's group may be gone by now
            continue
        ranks = {*dist.get_process_group_ranks(model.get_group())}
        for name, p in seen.items():
            if len(ranks_in_mesh(p, ranks)) < 2:
                record.noted[before][name] = norm_of(p) / clips


def check_noted(model, group):
    """Return which gradients differed between ranks that split the tokens, in words, or None.

    If they did, their sum over these ranks was forgotten. Compares norms that were noted, of
    gradients that several ranks have.
    """
    if not splits_tokens(model, group):
        return None
    record, error = record_of(model), None
    for before, norms in record.noted.items():
        local = [norms.get(name, math.nan) for name in record.shapes]
        found = gather_numbers([float(norm) for norm in local], group)
        # NaN, no gradient on that rank, is neither the least nor the largest.
        least = found.nan_to_num(math.inf, math.inf).amin(0)
        largest = found.nan_to_num(0.0, math.inf).amax(0)
        # (Sums by other means than `sum_gradients` may round differently on each rank.)
        unlike = largest.isfinite() & (largest - least > UNLIKE * largest)
        if unlike.any():
            name = list(record.shapes)[unlike.nonzero()[0].item()]
            error = error or (
                f"gradients of {name} differed between ranks, each of which had those of its own "
                f"tokens: call sum_gradients(model.parameters(), mesh) before the {before}"
            )
        norms.clear()
    return error


def ranks_that_split(parameters, group):
    """Return the ranks of `group` that split the weights of a model with some of these parameters.

    [] if there are less than two. (Ranks that split the tokens alone have all weights.)
    """
    known = {id(parameter) for parameter in parameters}
    ranks = {*dist.get_process_group_ranks(group)}
    for model in SHARING_BATCHES:
        if known.isdisjoint(map(id, model.parameters())):
            continue
        for other in (get_group() for get_group in model.batch_groups):
            both = sorted(ranks & {*dist.get_process_group_ranks(other)})
            if len(both) > 1 and not splits_tokens(model, other):
                return both
    return []


# ---------------------------------------------------------------- random choices


def check_sampling(given):
    """Raise ValueError if ranks that share batches would draw different new tokens.

    given: the arguments of Hugging Face's `generate`.
    """
    model, config = given["self"], given.get("generation_config")
    said = given.get("kwargs", {}).get("do_sample")
    for settings in config, model.generation_config:  # the latter says what the former does not
        said = getattr(settings, "do_sample", None) if said is None else said
    if not said or not hasattr(model, "batch_groups"):
        return
    states = [torch.get_rng_state()]
    if model.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(model.device))
    for group in (get_group() for get_group in model.batch_groups):
        if differ(gather_numbers([hash_of(states)], group).unbind(1)[0]):
            raise ValueError(
                f"ranks {dist.get_process_group_ranks(group)} have different random states, and "
                "would sample different tokens: call torch.manual_seed with one seed on all ranks"
            )


# ---------------------------------------------------------------- what these are built of


def gather_numbers(numbers, group):
    """Gather every rank's n numbers: (P, n), float64, on the CPU."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return all_gather(torch.as_tensor(numbers, dtype=torch.float64, device=device), group).cpu()


def is_capturing():
    """Tell whether a CUDA graph is being captured, in which no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
