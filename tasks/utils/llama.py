"""The seam to Hugging Face's Llama and its relatives: settings, hooks around them, and labels.

What a split model refuses is in `refusals.py`.

Shapes as in `utils/__init__.py`.
"""

import sys
import weakref
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3's norms of each head


def getter(group):
    """A function that returns `group`, for a module to have: deep copies of it have the same group.

    copy.deepcopy cannot copy a process group, but takes a function as it is.
    """
    return lambda: group


def bind(function, **given):
    """As functools.partial, whose arguments copy.deepcopy would copy; see `getter`."""
    return lambda *args, **kwargs: function(*args, **given, **kwargs)


@cache
def mixed_in(ours, kind):
    """A subclass of two: what `ours` has goes before what `kind`, a class of the library's, has."""
    return type(ours.__name__, (ours, kind), {"ordinary": kind})


def rope_of(config):
    """The rotary settings of a LlamaConfig: {} or {"rope_type": ..., ...}."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def window_of(config):
    """How many tokens, up to itself, a token looks at where layers have a window; None: at all."""
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds):
        return getattr(config, "sliding_window", None)
    return None


def check_ids(ids, vocab_size):
    """IndexError for ids that no rank has, as from a full embedding; else they would count as 0.

    On a GPU the device asserts it, as ever, and nobody waits for it.
    """
    F.embedding(ids, torch.zeros((), device=ids.device).expand(vocab_size, 1))


def next_tokens(labels, size, vocab_size, ignore_index=-100, shift_labels=None):
    """Labels (B, S), shifted: the target of each of `size` tokens; the last has none.

    Raises ValueError for labels that are not `size` and for `shift_labels`, labels that are shifted
    already, and IndexError as `check_ids` does.
    """
    if shift_labels is not None:
        raise ValueError("shift_labels: labels are shifted here")
    if labels.shape != size:
        raise ValueError(f"labels are {list(labels.shape)}, of tokens that are {list(size)}")
    targets = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    check_ids(targets.masked_fill(targets == ignore_index, 0), vocab_size)
    return targets


def refuse_adapters_across_tokens(model):
    """ValueError for PEFT's adapters that are not right where each rank has its own tokens."""
    if "peft" in sys.modules:
        from utils.adapters import check_by_token

        check_by_token(model)


def guard_dropout(model, ranks):
    """Refuse dropout of attention in training, by a ValueError, where ranks have different heads.

    With one seed, which they need, they would drop the same for different heads.
    """
    if ranks > 1:
        from utils.refusals import refuse_dropout

        guard(model, refuse_dropout)


def share_batches(model, group):
    """Remember that the ranks of `group` share each batch; DDP over several of them is refused.

    For it would take the mean of what are parts of one gradient, or of different slices'. That is
    also what Trainer and accelerate would do, by themselves, under torchrun.
    """
    model.sharing = [*getattr(model, "sharing", []), getter(group)]
    from utils.refusals import check_first, refuse_shared_batches

    check_first(DistributedDataParallel, "__init__", refuse_shared_batches)


class Guard:
    """A pre-hook, of a model or of a part, that calls check(model).

    It holds the model weakly, or this would not be freed at once. A deep copy of the model has its
    own.
    """

    def __init__(self, model, check):
        self.model, self.check = weakref.ref(model), check

    def __call__(self, part, _):
        self.check(self.model() or part)

    def __deepcopy__(self, memo):
        model = self.model()
        return Guard(memo.get(id(model), model), self.check) if model else self


def guard(model, check):
    """Call check(model) in each forward of a LlamaForCausalLM, whenever its adapters were added."""
    for part in model, model.model:  # PEFT, or a user, may call only one of them with its hooks
        part.register_forward_pre_hook(Guard(model, check))


def llama_of(model):
    """The LlamaForCausalLM, or its relative, which may be under PEFT."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def trained_parameters(model):
    """{name: parameter} of what is trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
