"""The seam to Hugging Face's Llama and its relatives: what they are made of, hooks around them,
what a split one refuses, and its labels.

Shapes as in `utils/__init__.py`.
"""

import inspect
import sys
import weakref
from functools import cache, wraps

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

# What techniques know of a model: its parts, by their names. Norms of heads are Qwen3's.
OF_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
OF_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
OF_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


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


def check_ordinary(model):
    """Reject what is not built as a LlamaForCausalLM, subclasses, and models of DTensors.

    Built so are Mistral, Qwen2, Qwen3 and SmolLM3, too: a model is known by its parts. By a
    ValueError, which names the part that is not known, or missing.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers.models."):
        raise ValueError(f"not an ordinary LlamaForCausalLM: {name}")
    check_parts(name, model, {"model", "lm_head"})
    check_parts(f"{name}'s model", model.model, OF_MODEL)
    for layer in model.model.layers:
        check_parts(f"a layer of {name}", layer, OF_LAYER)
        check_parts(f"attention of {name}", layer.self_attn, OF_ATTENTION, HEAD_NORMS)
        check_parts(f"the MLP of {name}", layer.mlp, OF_MLP)
        for norm in HEAD_NORMS & dict(layer.self_attn.named_children()).keys():
            size, D = layer.self_attn.get_submodule(norm).weight.numel(), layer.self_attn.head_dim
            if size != D:
                raise ValueError(f"attention of {name}: {norm} is of {size}, not of a head's {D}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("weights are DTensors, which are not split by tokens here")


def check_parts(name, module, parts, more=frozenset()):
    """ValueError for a module without some of these parts, or with others; `more`: it may have."""
    found = dict(module.named_children()).keys()
    unknown = sorted((found - parts - more) | dict(module.named_parameters(recurse=False)).keys())
    if unknown or parts - found:
        missing = sorted(parts - found)
        said = [f"has {', '.join(unknown)}"] * bool(unknown)
        said += [f"has no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"not built as a LlamaForCausalLM: {name} {' and '.join(said)}")


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
        guard(model, refuse_dropout)


def refuse_dropout(model):
    attention = getattr(model, "model", model).layers[0].self_attn.modules()  # PEFT may wrap it
    rate = next((m.attention_dropout for m in attention if hasattr(m, "attention_dropout")), 0)
    if model.training and rate:
        raise ValueError(
            f"attention_dropout {rate} in training: ranks would drop the same for different heads"
        )


def share_batches(model, group):
    """Remember that the ranks of `group` share each batch; DDP over several of them is refused.

    For it would take the mean of what are parts of one gradient, or of different slices'. That is
    also what Trainer and accelerate would do, by themselves, under torchrun.
    """
    model.sharing = [*getattr(model, "sharing", []), getter(group)]
    refuse_ddp()


def refuse_ddp():
    """From now on DistributedDataParallel raises ValueError over ranks that share each batch."""
    original = DistributedDataParallel.__init__
    if hasattr(original, "refuses_sharing"):
        return

    @wraps(original)
    def __init__(self, module, *args, **kwargs):
        given = inspect.signature(original).bind(self, module, *args, **kwargs).arguments
        mesh = given.get("device_mesh")
        ranks = dist.get_process_group_ranks(
            mesh.get_group() if mesh else given.get("process_group")
        )
        for part in module.modules():
            for get_group in getattr(part, "sharing", ()):
                both = sorted({*ranks} & {*dist.get_process_group_ranks(get_group())})
                if len(both) > 1:
                    raise ValueError(
                        f"DDP over ranks {both}, which share each batch and the model's work: give "
                        "it the process group of the axis of replicas, if there is one"
                    )
        original(self, module, *args, **kwargs)

    __init__.refuses_sharing = True
    DistributedDataParallel.__init__ = __init__


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
