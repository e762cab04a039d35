"""The configuration and generation settings of the full model that a split one stands for."""

import copy

# What techniques change in a model's configuration, for their own use.
CHANGED = "use_cache", "_attn_implementation", "num_hidden_layers"


def settings_of(model):
    """Return copies of the full model's configuration and generation settings, as they are now.

    If there is a `model.before`, the settings CHANGED by a technique are taken from there.
    """
    now = copy.deepcopy((model.config, model.generation_config))
    for settings, before in zip(now, getattr(model, "before", ()), strict=False):
        for name in CHANGED:
            if hasattr(before, name):
                setattr(settings, name, getattr(before, name))
    return now
