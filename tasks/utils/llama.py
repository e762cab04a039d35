"""The seam to Hugging Face's Llama and its relatives: settings, hooks around them, and labels.

What a split model refuses is in `guards/`. Shapes as in `utils/__init__.py`.
"""

import weakref
from functools import cache

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

HEAD_NORMS = {"q_norm", "k_norm"}  # Qwen3's norms of each head
BY_LENGTH = "dynamic", "longrope"  # RoPE whose factors depend on the sequence's length
PROMPTED = weakref.WeakKeyDictionary()  # {model: a reference to the PEFT model that prompts it}


def getter(group):
    """Return a function that returns `group`, for a module that may be copied.

    copy.deepcopy cannot copy a process group, but takes a function as it is.
    """
    return lambda: group


def bind(function, **given):
    """Do as functools.partial does, but deepcopy keeps the arguments as they are; see `getter`."""
    return lambda *args, **kwargs: function(*args, **given, **kwargs)


@cache
def mixed_in(ours, theirs):
    """Make a subclass of `ours` and of `theirs`, a class of the library; `ours` has precedence."""
    return type(ours.__name__, (ours, theirs), {"ordinary": theirs})


def rope_of(config):
    """Return the rotary settings of a LlamaConfig: {} or {"rope_type": ..., ...}."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def window_of(config):
    """Return how many tokens, itself included, a token sees in layers with a window, else None."""
    types = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) and (not types or "sliding_attention" in types):
        return getattr(config, "sliding_window", None)
    return None


def check_ids(ids, vocab_size):
    """Raise IndexError, as a full embedding does, for ids that no rank has: else zeros come out.

    On a GPU it is a device-side assertion, as for any embedding, and is not waited for here.
    """
    F.embedding(ids, torch.zeros((), device=ids.device).expand(vocab_size, 1))


def next_tokens(labels, size, vocab_size, ignore_index=-100, shift_labels=None):
    """Shift labels (B, S): return the target of each token; the last has none. size: (B, S).

    Raises ValueError for labels that are not of shape `size`, and for `shift_labels`, which are
    shifted already; IndexError as `check_ids` does.
    """
    if shift_labels is not None:
        raise ValueError("shift_labels: give labels, which are shifted here")
    if labels.shape != size:
        raise ValueError(f"labels are {list(labels.shape)}, of tokens that are {list(size)}")
    targets = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    check_ids(targets.masked_fill(targets == ignore_index, 0), vocab_size)
    return targets


def guard_dropout(model, ranks):
    """Refuse dropout of attention in training, with a ValueError, if ranks have different heads.

    All ranks need one seed, so they would drop the same entries in different heads.
    """
    if ranks > 1:
        from guards.refusals import refuse_dropout

        guard(model, refuse_dropout)


def expect_same_batches(model, group):
    """Remember that the ranks of `group` share each batch, and refuse what would be wrong then.

    ValueError is raised for: batches or weights that differ between the ranks; clipping or an
    optimizer step before `sum_gradients`, where tokens are split (both are found in a later
    forward); DDP over several of these ranks; sampling with different random states.
    """
    from guards.training import guard_batches

    model.batch_groups = [*getattr(model, "batch_groups", []), getter(group)]
    guard_batches(model)


class Guard:
    """A pre-hook, of a model or of a part, that calls check(model).

    It holds the model weakly, or the model would not be freed at once. A deep copy of the model has
    a Guard of its own.
    """

    def __init__(self, model, check):
        self.model, self.check = weakref.ref(model), check

    def __call__(self, part, _):
        self.check(self.model() or part)

    def __deepcopy__(self, memo):
        model = self.model()
        return type(self)(memo.get(id(model), model), self.check) if model else self


def guard(model, check):
    """Call check(model) in each forward of a LlamaForCausalLM, also when adapters were added."""
    for part in model, model.model:  # PEFT, or a user, may call only one of them with its hooks
        part.register_forward_pre_hook(Guard(model, check))


def llama_of(model):
    """Return the LlamaForCausalLM, or its relative, in a model that may be under PEFT."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def trained_parameters(model):
    """Return {name: parameter} of what is trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
