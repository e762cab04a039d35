"""Which of PEFT's adapters are right on a split model. PEFT itself is not imported here.

Under sequence parallelism an adapter sees a rank's own tokens. It is right if what it does to a
token depends neither on other tokens nor on chance, and if it adds nothing to the loss. This is
known of the adapters below: tests compare them with plain PEFT. All others are refused. Of PEFT's
prompts only virtual tokens are right; those that bring keys and values, or a loss, are refused.
"""

import inspect
import weakref

from utils.llama import PROMPTED

# Packages of peft.tuners (all their layers); then classes: PEFT's other layers, LoRA's variants.
KNOWN_ADAPTERS = {
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
    """Return the names, as in `KNOWN_ADAPTERS`, of PEFT's adapters in a model's layers."""
    names = set()
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            layer = getattr(module.forward, "__self__", module)  # X-LoRA replaces LoRA's forward
            _, *path = type(layer).__module__.split(".")
            names.add(path[1] if path[0] == "tuners" else type(layer).__name__)
            active = getattr(layer, "active_adapters", ())
            variants = getattr(layer, "lora_variant", {})
            names |= {type(x).__name__ for name, x in variants.items() if name in active}
    return names


def check_prompt(model):
    """Raise ValueError for a prompt of PEFT's that is more than virtual tokens; remember others.

    The prompt is no part of the model. Only PEFT's forward, which has called the model's
    forward, knows of the prompt: so look for its frame on the call stack.
    """
    frame = inspect.currentframe()
    while frame:
        if frame.f_globals.get("__name__") == "peft.peft_model":
            prompted = frame.f_locals.get("self")
            config = getattr(prompted, "active_peft_config", None)
            peft_type = config.peft_type.value if config and config.is_prompt_learning else None
            if peft_type and peft_type not in VIRTUAL_TOKENS:
                right = ", ".join(VIRTUAL_TOKENS)
                raise ValueError(f"{peft_type}: of PEFT's prompts only {right} are right here")
            if peft_type:
                PROMPTED[model] = weakref.ref(prompted)
        frame = frame.f_back


def check_by_token(model):
    """Raise ValueError for adapters not in `KNOWN_ADAPTERS`, and as `check_prompt` does."""
    if unknown := adapters_of(model) - KNOWN_ADAPTERS:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"{names}: adapters that are not known to treat each token alone")
    check_prompt(model)


def dropping_adapter(model):
    """Return the name of an adapter that leaves out parts of its weights by chance, or None.

    In training, that is. (LoRA's dropout, of its inputs, is an nn.Dropout.)
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        rates = [module.p] if type(module).__name__ == "MultiplicativeDropoutLayer" else []  # OFT's
        for kind in "rank_dropout", "module_dropout":  # LoHa's, LoKr's: {adapter: rate}
            table = getattr(module, kind, None)
            if isinstance(table, dict):
                rates += [table.get(active, 0.0) for active in module.active_adapters]
        if any(rates):
            return name
    return None


def refuse_adapters(model):
    """Raise ValueError for adapters (slices of weights take none), and as `check_prompt` does."""
    if names := adapters_of(model):
        raise ValueError(
            f"{', '.join(sorted(names))}: PEFT's adapters do not know of slices of weights; use "
            "them with sequence parallelism alone"
        )
    check_prompt(model)
