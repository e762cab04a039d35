"""What ranks that share each batch must have alike, compared where a difference would go unseen.

Each comparison takes a message, so each is made once. All ranks of a group raise together. Shapes
as in `utils/__init__.py`.
"""

import hashlib
import math
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from utils.collectives import all_gather
from utils.full_model import norm_of
from utils.gradients import local_part
from utils.llama import PROMPTED, Guard
from utils.shards import is_slice, shard_of

# {model: None} of which several ranks work on one batch. In order, which is the same on all ranks.
SHARING_BATCHES = weakref.WeakKeyDictionary()
FIRST_STEP_DONE = weakref.WeakSet()  # optimizers
CLIPPED = weakref.WeakSet()  # models
ENDS = 32  # of each weight, so many numbers at its beginning and end are compared


# ---------------------------------------------------------------- batches and weights, in a forward


class BatchGuard(Guard):
    """A pre-hook with keyword arguments that calls check(model, arguments).

    If tokens are split, the model's own forward calls the check: its parts get a rank's own tokens.
    """

    def __call__(self, part, args, kwargs):
        model = self.model() or part
        if not hasattr(model, "sequence_parts"):
            self.check(model, {**dict(enumerate(args)), **kwargs})


def share_batches(model):
    """Let a model's forwards call `check_forward`. model: with `batch_groups`, not yet split."""
    if not hasattr(model, "row_at_split"):  # not split over another axis before
        model.row_at_split = first_row(model.model.layers[0].mlp.down_proj.weight)
        for part in model, model.model:  # PEFT, or a user, may call only one of them with its hooks
            part.register_forward_pre_hook(BatchGuard(model, check_forward), with_kwargs=True)
    model.model.batch_groups = model.batch_groups  # DDP may get this part alone
    SHARING_BATCHES[model] = None


def check_forward(model, given):
    """Raise ValueError, on all ranks, if ranks that share a batch have unlike ones.

    Compares token ids, labels and masks, in the first forward in training and the first one in
    evaluation: a sampler for data parallelism gives each rank other rows. In the first of all it
    also compares weights, see `hash_of_start` and `hash_of_replicas`. given: {name: argument}.
    """
    if torch.compiler.is_compiling():
        return
    compared = vars(model).get("compared_modes", ())
    if model.training in compared:
        return
    tensors = {key: x for key, x in given.items() if type(x) is torch.Tensor}
    if not tensors or any(x.is_meta for x in tensors.values()) or is_capturing():
        return
    model.compared_modes = *compared, model.training
    SHARING_BATCHES[model] = None  # it may be a copy of the one that was split
    # (Masks of S x S are left out: they may be most of the memory.)
    whole = {k: x for k, x in tensors.items() if x.dim() <= 2 and not x.is_floating_point()}
    shapes = [(key, list(x.shape)) for key, x in tensors.items()]
    batch, start = hash_of([str(shapes), *whole.values()]), hash_of_start(model)
    found = []
    # All messages before any error, or ranks of the next group would wait for those that raised.
    for group in [get_group() for get_group in model.batch_groups]:
        weights = [math.nan] * 2 if compared else [start, hash_of_replicas(model, group)]
        ranks = dist.get_process_group_ranks(group)
        found.append((ranks, *gather_numbers([batch, *weights], group).unbind(1)))
    for ranks, batches, starts, replicas in found:
        if differ(batches):
            raise ValueError(
                f"ranks {ranks} have different batches, and split one model or its tokens: give "
                "them the same, and let a sampler deal out rows to replicas only"
            )
        if differ(starts):
            raise ValueError(
                f"ranks {ranks} had different weights when the model was split: make it with one "
                "seed on all ranks, or load it"
            )
        if differ(replicas):
            raise ValueError(
                f"ranks {ranks} have different values of weights that each of them has: make the "
                "model, its adapters and its prompt with one seed on all ranks, or load them"
            )


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


def first_row(weight):
    """Return a copy, on the CPU, of a full weight's first row; None for any other weight."""
    full = not (weight.is_meta or is_slice(weight) or isinstance(weight, DTensor))
    return weight[0].detach().cpu().clone() if full else None


def hash_of_start(model):
    """Return a number that stands for the weights before the split; NaN if others were loaded.

    What was loaded is seen in the row that was kept: this rank's part of it is another one.
    """
    weight, row = model.model.layers[0].mlp.down_proj.weight, model.row_at_split
    if row is None or weight.is_meta:
        return math.nan
    (rows, columns), local = shard_of(weight), local_part(weight.detach())
    if rows.start or not len(local) or not local[0].cpu().to(row.dtype).equal(row[columns]):
        return math.nan
    return hash_of([row.double()])


def hash_of_replicas(model, group):
    """Return a number that stands for the weights of which each rank of `group` has the same part.

    They are all weights where the group splits the tokens; else those that are not split. A
    weight's beginning and end stand for it. DTensors are left out: PyTorch made them alike. So is
    FSDP1, which shows its parts as if they were the weights; then it is NaN.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return math.nan
    of_tokens = splits_tokens(model, group)
    ends = [torch.zeros(1, dtype=torch.float64, device=model.device)]
    for name, parameter in with_prompt(model).items():
        # (Where weights are split, rank 0 alone adds the bias behind a sum.)
        alike = of_tokens or not (is_slice(parameter) or name.endswith(".bias"))
        if alike and not isinstance(parameter, DTensor) and not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            ends += [end.to(ends[0]) for end in (flat[:ENDS], flat[-ENDS:])]
    return hash_of([torch.cat(ends)])


def splits_tokens(model, group):
    """Tell whether the ranks of `group` have a model's tokens split between them."""
    ranks = dist.get_process_group_ranks
    return hasattr(model, "sequence_parts") and ranks(model.get_group()) == ranks(group)


def with_prompt(model):
    """Return {name: parameter} of a model, and of the prompt that PEFT puts in front of it."""
    prompted = PROMPTED.get(model, lambda: None)()
    return dict((prompted or model).named_parameters())


# ---------------------------------------------------------------- gradients


def check_first_sums(optimizer):
    """Compare gradients in an optimizer's first step, see `check_sums`."""
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    if optimizer in FIRST_STEP_DONE or is_capturing():
        return
    if any(type(p.grad) is torch.Tensor for p in parameters):
        FIRST_STEP_DONE.add(optimizer)
        check_sums(parameters, list(SHARING_BATCHES), "step")


def check_clipping(given):
    """Compare gradients when a model's are clipped for the first time, see `check_sums`.

    Each rank would clip by the norm of its own tokens' gradients, and a sum after that would hide
    it. given: the arguments of PyTorch's `clip_grad_norm_`.
    """
    models = [model for model in SHARING_BATCHES if model not in CLIPPED]
    if models and given["max_norm"] != math.inf and not is_capturing():
        tensors = given["parameters"]
        parameters = [tensors] if torch.is_tensor(tensors) else list(tensors)
        CLIPPED.update(check_sums(parameters, models, "clipping"))


def check_sums(parameters, models, before):
    """Raise ValueError, on all ranks, if gradients differ between ranks that split the tokens.

    Then their sum over these ranks was forgotten. Compares, by their norms, gradients that several
    ranks have. Returns those of `models` that have some of the parameters. before: what comes next,
    in words. (FSDP2 sums its gradients, which are DTensors, by itself.)
    """
    trained, compared = {id(p) for p in parameters if type(p.grad) is torch.Tensor}, []
    for model in models:
        named = with_prompt(model) if hasattr(model, "sequence_parts") else {}
        if trained.isdisjoint(map(id, named.values())):
            continue
        compared.append(model)
        norms = [norm_of(p).item() if id(p) in trained else math.nan for p in named.values()]
        found = gather_numbers(norms, model.get_group())
        least = found.nan_to_num(math.inf, math.inf).amin(0)
        largest = found.nan_to_num(0.0, math.inf).amax(0)
        # (Sums by other means than `sum_gradients` may round differently on each rank.)
        unlike = largest.isfinite() & (largest - least > 1e-2 * largest)
        if unlike.any():
            name = list(named)[unlike.nonzero()[0].item()]
            raise ValueError(
                f"gradients of {name} differ between ranks, each of which has those of its own "
                f"tokens: call sum_gradients(model.parameters(), mesh) before the {before}"
            )
    return compared


def ranks_that_split(parameters, group):
    """Return the ranks of `group` that split the weights of a model with some of these parameters.

    [] if there are less than two. (Ranks that split the tokens alone have all weights.)
    """
    known = {id(parameter) for parameter in parameters}
    ranks = {*dist.get_process_group_ranks(group)}
    for model in SHARING_BATCHES:
        for other in (get_group() for get_group in model.batch_groups):
            both = sorted(ranks & {*dist.get_process_group_ranks(other)})
            if len(both) < 2 or splits_tokens(model, other):
                continue
            if not known.isdisjoint(map(id, model.parameters())):
                return both
    return []


# ---------------------------------------------------------------- random choices


def check_sampling(given):
    """Raise ValueError if ranks that share batches would choose new tokens by unlike chance.

    given: the arguments of Hugging Face's `generate`.
    """
    model = given["self"]
    config = given.get("generation_config") or model.generation_config
    sampled = given.get("kwargs", {}).get("do_sample", getattr(config, "do_sample", False))
    if not sampled or not hasattr(model, "batch_groups"):
        return
    states = [torch.get_rng_state()]
    if model.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(model.device))
    for get_group in model.batch_groups:
        group = get_group()
        if differ(gather_numbers([hash_of(states)], group).unbind(1)[0]):
            raise ValueError(
                f"ranks {dist.get_process_group_ranks(group)} have different random states, and "
                "would sample different tokens: call torch.manual_seed with one seed on all ranks"
            )


# ---------------------------------------------------------------- what these are built of


def gather_numbers(numbers, group):
    """Gather every rank's list of n numbers: (P, n), float64, on the CPU."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return all_gather(torch.tensor(numbers, dtype=torch.float64, device=device), group).cpu()


def is_capturing():
    """Tell whether a CUDA graph is being captured, in which no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
