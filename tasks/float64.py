"""Hugging Face's Llama has float32 parts whatever its dtype; here they are made float64, too."""

from torch import nn


def compute_in_float64(model):
    """Make a float64 model's norms and rotary tables float64; Hugging Face has them in float32.

    Without it a float64 comparison is blunt: the final norm rounds differences below 1e-8 away.
    Done alike to the reference and to the parallel model. Works on any module.
    """
    for name, module in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0])
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, device="meta")
            norm.weight = module.weight
            setattr(parent, name.rpartition(".")[2], norm)
        elif type(module).__name__ == "LlamaRotaryEmbedding" and not isinstance(parent, Rotary64):
            setattr(parent, name.rpartition(".")[2], Rotary64(module))


class Rotary64(nn.Module):
    """LlamaRotaryEmbedding with its angles, sines and cosines in float64."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        """x: for its dtype only; position_ids (B, S) -> cos, sin (B, S, D)."""
        self.rotary(x, position_ids)  # some kinds of RoPE set their frequencies by the length
        angles = (position_ids[..., None] * self.rotary.inv_freq.double()).repeat(1, 1, 2)
        scaling = self.rotary.attention_scaling
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)
