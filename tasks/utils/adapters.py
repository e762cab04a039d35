"""Which of PEFT's adapters are right on a split model. PEFT itself is not imported here.

Under sequence parallelism an adapter sees a rank's own tokens. It is right if what it does to a
token depends on no other token, not on chance, and if it adds nothing to the loss. Those below are
known to be so: tests compare them with plain PEFT. All others are refused.
"""

import sys

# By the package of PEFT's layers, or else by the class; variants of LoRA by their class.
BY_TOKEN = {
    "adaption_prompt", "beft", "boft", "bone", "c3a", "deft", "delora", "fourierft", "frod",
    "glora", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft",
    "osf", "peanut", "psoft", "randlora", "road", "shira", "supertuning", "tinylora",
    "trainable_tokens", "unilora", "vblora", "vera", "waveft", "_buffer_dict",
    "ModulesToSaveWrapper", "TrainableTokensWrapper",
    "BdLoraLinearVariant", "DoraEmbeddingVariant", "DoraLinearVariant", "KasaLinearVariant",
    "MiCAEmbeddingVariant", "MiCALinearVariant",
}  # fmt: skip


def adapters_of(model):
    """The kinds of PEFT's adapters in a model's layers, as in `BY_TOKEN`."""
    kinds = set()
    if "peft" not in sys.modules:  # then there is none
        return kinds
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            layer = getattr(module.forward, "__self__", module)  # X-LoRA's do the work of LoRA's
            _, *path = type(layer).__module__.split(".")
            kinds.add(path[1] if path[0] == "tuners" else type(layer).__name__)
            kinds |= {type(x).__name__ for x in getattr(layer, "lora_variant", {}).values()}
    return kinds


def guard(model, check):
    """Call `check` before each forward of a LlamaForCausalLM, whenever its adapters were added."""
    for part in model, model.model:  # that alone, where PEFT or a user calls no other
        part.register_forward_pre_hook(check)


def check_by_token(model, *_):
    """ValueError for adapters that are not known to treat each token alone. A hook, too."""
    if unknown := adapters_of(model) - BY_TOKEN:
        raise ValueError(f"{', '.join(sorted(unknown))}: adapters that are not known to treat each "
                         "token alone, as a split sequence needs it")  # fmt: skip


def refuse_adapters(model, *_):
    """ValueError for adapters of layers: none is right on slices of weights. A hook, too."""
    if kinds := adapters_of(model):
        raise ValueError(f"{', '.join(sorted(kinds))}: PEFT's adapters do not know of slices of "
                         "weights; use them with sequence parallelism alone")  # fmt: skip
