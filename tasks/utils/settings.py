"""The configuration and generation settings of the full model that a split one stands for."""

import copy

# What techniques change in a model's configuration, for their own use.
CHANGED = "use_cache", "_attn_implementation", "num_hidden_layers", "layer_types"


def settings_of(model):
    """Return copies of the full model's configuration and generation settings, as they are now.

    The settings CHANGED by a technique come from `model.original_settings`, if there is one.
    """
    now = copy.deepcopy((model.config, getattr(model, "generation_config", None)))
    for settings, original in zip(now, getattr(model, "original_settings", ()), strict=False):
        for name in CHANGED:
            if hasattr(original, name):
                setattr(settings, name, getattr(original, name))
    return now
