"""Which of PEFT's adapters are right on a split model. PEFT itself is not imported here.

Under sequence parallelism an adapter sees a rank's own tokens. It is right if what it does to a
token depends on no other token, not on chance, and if it adds nothing to the loss. Those below are
known to be so: tests compare them with plain PEFT. All others are refused. So are prompts that do
more than stand before the embeddings: those that bring keys and values, or a loss of their own.
"""

import inspect

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

VIRTUAL_TOKENS = "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"


def adapters_of(model):
    """The kinds of PEFT's adapters in a model's layers, as in `BY_TOKEN`."""
    kinds = set()
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            layer = getattr(module.forward, "__self__", module)  # X-LoRA's do the work of LoRA's
            _, *path = type(layer).__module__.split(".")
            kinds.add(path[1] if path[0] == "tuners" else type(layer).__name__)
            active = getattr(layer, "active_adapters", ())
            variants = getattr(layer, "lora_variant", {})
            kinds |= {type(x).__name__ for name, x in variants.items() if name in active}
    return kinds


def check_prompt():
    """ValueError for a prompt of PEFT's that is more than virtual tokens.

    It is no part of the model that it stands before. Only the frame of PEFT's forward, which has
    called the model's, tells of it.
    """
    frame = inspect.currentframe()
    while frame:
        if frame.f_globals.get("__name__") == "peft.peft_model":
            config = getattr(frame.f_locals.get("self"), "active_peft_config", None)
            kind = config.peft_type.value if config and config.is_prompt_learning else None
            if kind and kind not in VIRTUAL_TOKENS:
                raise ValueError(f"{kind}: of PEFT's prompts only virtual tokens are right here: "
                                 f"{', '.join(VIRTUAL_TOKENS)}")  # fmt: skip
        frame = frame.f_back


def check_by_token(model):
    """ValueError for adapters that are not known to treat each token alone."""
    if unknown := adapters_of(model) - BY_TOKEN:
        raise ValueError(f"{', '.join(sorted(unknown))}: adapters that are not known to treat each "
                         "token alone, as a split sequence needs it")  # fmt: skip
    check_prompt()


def refuse_adapters(model):
    """ValueError for adapters of layers: none is right on slices of weights."""
    if kinds := adapters_of(model):
        raise ValueError(f"{', '.join(sorted(kinds))}: PEFT's adapters do not know of slices of "
                         "weights; use them with sequence parallelism alone")  # fmt: skip
    check_prompt()
