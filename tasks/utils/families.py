"""The seam to Hugging Face: where a Llama, its relatives and a GPT-2 have their parts.

Scripts that split layers or samples take a GPT-2, too; scripts that split within layers do not.
"""

from dataclasses import dataclass

import transformers
from torch import nn


@dataclass(frozen=True)
class Family:
    """A kind of model, by the library's names for its classes and for its parts."""

    model_type: str  # config.model_type
    config: str
    model: str
    layer: str
    base: str  # in the model; the next four are in the base, attention is in a layer
    layers: str
    embedding: str
    positions: str | None  # an embedding of positions, where there is one
    norm: str  # after the last layer
    attention: str

    @property
    def config_class(self):
        return getattr(transformers, self.config)

    @property
    def model_class(self):
        return getattr(transformers, self.model)

    @property
    def embedding_weight(self):
        """Return the name of the embedding's parameter."""
        return f"{self.base}.{self.embedding}.weight"


def built_as_llama(model_type, name):
    """Return a family whose parts have the names of a Llama's parts."""
    return Family(
        model_type=model_type, config=f"{name}Config", model=f"{name}ForCausalLM",
        layer=f"{name}DecoderLayer", base="model", layers="layers", embedding="embed_tokens",
        positions=None, norm="norm", attention="self_attn",
    )  # fmt: skip


LLAMA = built_as_llama("llama", "Llama")
RELATIVES = (
    built_as_llama("mistral", "Mistral"),
    built_as_llama("qwen2", "Qwen2"),
    built_as_llama("qwen3", "Qwen3"),
    built_as_llama("smollm3", "SmolLM3"),
)
GPT2 = Family(
    model_type="gpt2", config="GPT2Config", model="GPT2LMHeadModel", layer="GPT2Block",
    base="transformer", layers="h", embedding="wte", positions="wpe", norm="ln_f",
    attention="attn",
)  # fmt: skip
FAMILIES = {family.model_type: family for family in (LLAMA, *RELATIVES, GPT2)}


def family_of(model):
    return FAMILIES[model.config.model_type]


def base_of(model):
    """Return the model without its head."""
    return getattr(model, family_of(model).base)


def layers_of(model):
    """Return the model's layers, an nn.ModuleList."""
    return getattr(base_of(model), family_of(model).layers)


def embedding_of(model):
    """Return the model's token embedding; None in a pipeline's stage that has no embedding."""
    return getattr(base_of(model), family_of(model).embedding)


def norm_of(model):
    """Return the norm after the model's last layer."""
    return getattr(base_of(model), family_of(model).norm)


class LayersInOrder(nn.ModuleList):
    """Some layers of a model, indexed by their place here, named as they are in the model.

    nn.ModuleList would look up index i by the name i; GPT-2 of transformers 4 indexes its layers.
    """

    def __getitem__(self, place):
        return list(self)[place]
