"""PEFT's methods over Task 4's model on all ranks, beside plain PEFT on the whole model; float64.

    torchrun --nproc_per_node 2 tests/helpers/peft_methods.py TASKS

TASKS: the folder of the scripts. Prints a line for each setting that is right, and for each that is
refused with the message that it must have. Ends in an AssertionError otherwise.
"""

import copy
import logging
import sys
import tempfile
import warnings
from functools import partial

sys.path.insert(0, sys.argv[1])

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.lora import config as of_lora
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_llama import dtensor_parallelize
from guards import adapters
from harness.float64 import compute_in_float64
from memory.long_sequence import Techniques, supported_techniques
from ring_attention import ring_parallelize
from tp_llama import tensor_parallelize
from tp_ulysses import parallelize_tp_sp
from ulysses_finetune import shard_loss
from ulysses_forward import sequence_parallelize
from utils.full_model import save_pretrained
from utils.replicas import sum_gradients

CAUSAL = dict(task_type="CAUSAL_LM")
LINEAR = CAUSAL | dict(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
EVERY = CAUSAL | dict(target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"])
VIRTUAL = CAUSAL | dict(num_virtual_tokens=3)
INVOCATION = [9, 10]


def lora(**settings):
    return peft.LoraConfig(**LINEAR | settings)


# Functions: older versions of PEFT lack some.
RIGHT = {
    "LoRA": lora,
    "rsLoRA": lambda: lora(use_rslora=True),
    "DoRA": lambda: lora(use_dora=True),
    "LoRA with biases": lambda: lora(lora_bias=True),
    "LoRA and biases": lambda: lora(bias="all"),
    "LoRA of embedding and head": lambda: peft.LoraConfig(**EVERY),
    "DoRA of embedding and head": lambda: peft.LoraConfig(use_dora=True, **EVERY),
    "LoRA of some ranks": lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "LoRA of one layer": lambda: lora(layers_to_transform=[1]),
    "LoRA of parameters": lambda: lora(target_modules=[], target_parameters=["q_proj.weight"]),
    "PiSSA": lambda: lora(init_lora_weights="pissa"),
    "OLoRA": lambda: lora(init_lora_weights="olora"),
    "MiCA": lambda: lora(init_lora_weights="mica"),
    "KaSA": lambda: lora(kasa_config=of_lora.KasaConfig()),
    "BD-LoRA": lambda: lora(
        use_bdlora=of_lora.BdLoraConfig(
            target_modules_bd_a=["q_proj"], target_modules_bd_b=["o_proj"], nblocks=2,
            match_strict=False,
        )
    ),
    "layers replicated": lambda: lora(layer_replication=[(0, 2), (1, 2)]),
    "modules to save": lambda: lora(modules_to_save=["lm_head", "norm", "embed_tokens"]),
    "an MLP to save": lambda: lora(target_modules=["q_proj"], modules_to_save=["mlp"]),
    "tied modules to save": lambda: lora(
        ensure_weight_tying=True, modules_to_save=["lm_head", "embed_tokens"]
    ),
    "tokens beside LoRA": lambda: lora(trainable_token_indices=[3, 7, 100]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 7, 100], **CAUSAL),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **LINEAR),
    "VeRA": lambda: peft.VeraConfig(r=4, **LINEAR),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, **LINEAR),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **LINEAR),
    "LoHa": lambda: peft.LoHaConfig(**LINEAR),
    "LoKr": lambda: peft.LoKrConfig(**LINEAR),
    "HRA": lambda: peft.HRAConfig(**LINEAR),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], **CAUSAL),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, **LINEAR),
    "VB-LoRA": lambda: peft.VBLoRAConfig(vector_length=4, num_vectors=16, **LINEAR),
    "Bone": lambda: peft.BoneConfig(r=8, **LINEAR),
    "MiSS": lambda: peft.MissConfig(r=8, **LINEAR),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, **LINEAR),
    "RoAd": lambda: peft.RoadConfig(group_size=4, **LINEAR),
    "HiRA": lambda: peft.HiraConfig(**LINEAR),
    "SHiRA": lambda: peft.ShiraConfig(r=2, **LINEAR),
    "C3A": lambda: peft.C3AConfig(block_size=4, **LINEAR),
    "WaveFT": lambda: peft.WaveFTConfig(n_frequency=20, **LINEAR),
    "DeLoRA": lambda: peft.DeloraConfig(**LINEAR),
    "GraLoRA": lambda: peft.GraloraConfig(r=8, gralora_k=2, **LINEAR),
    "OSF": lambda: peft.OSFConfig(**LINEAR),
    "BEFT": lambda: peft.BeftConfig(**LINEAR),
    "FRoD": lambda: peft.FrodConfig(**LINEAR),
    "GLoRA": lambda: peft.GloraConfig(**LINEAR),
    "Uni-LoRA": lambda: peft.UniLoraConfig(**LINEAR),
    "TinyLoRA": lambda: peft.TinyLoraConfig(**LINEAR),
    "PSOFT": lambda: peft.PsoftConfig(r=4, **LINEAR),
    "PEANuT": lambda: peft.PeanutConfig(**LINEAR),
    "SuperTuning": lambda: peft.SupertuningConfig(**LINEAR),
    "DEFT": lambda: peft.DeftConfig(**LINEAR),
    "LLaMA-Adapter": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "a prompt of sampled tokens": lambda: peft.PromptTuningConfig(
        prompt_tuning_init="SAMPLE_VOCAB", **VIRTUAL
    ),
    "P-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **VIRTUAL),
}  # fmt: skip
# Name: the setting, and what the message says: of the model's forward, and of `shard_loss`.
REFUSED = {
    "aLoRA": (lambda: lora(alora_invocation_tokens=INVOCATION), "ALoraLinearVariant"),
    "aLoRA of the head": (
        lambda: lora(alora_invocation_tokens=INVOCATION, target_modules=["lm_head"]),
        "ALoraLinearVariant",
    ),
    "AdaLoRA": (
        lambda: peft.AdaLoraConfig(total_step=10, tinit=1, tfinal=1, **LINEAR), "adalora"
    ),
    "VeLoRA": (lambda: lora(velora_config=of_lora.VeloraConfig(num_groups=4)), "VeloraLinear"),
    "Lily": (lambda: peft.LilyConfig(**LINEAR), "lily"),
    "PVeRA": (lambda: peft.PveraConfig(r=4, **LINEAR), "pvera"),
    "MonteCLoRA": (
        lambda: lora(monteclora_config=of_lora.MontecloraConfig()), "MontecloraLinearVariant"
    ),
    "Shadow": (lambda: peft.ShadowConfig(**CAUSAL), "shadow"),
    "prefix tuning": (lambda: peft.PrefixTuningConfig(**VIRTUAL), "PREFIX_TUNING: of PEFT's"),
    "CPT": (
        lambda: peft.CPTConfig(
            cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3], **CAUSAL
        ),
        "CPT: of PEFT's prompts",
    ),
}  # fmt: skip
# Those of whose forward this is not asked: PEFT raises an error of its own before, or behind, ours.
REFUSED_LOSS = {
    "Poly": (lambda: peft.PolyConfig(n_tasks=2, n_skills=2, **LINEAR), "poly"),
    "multitask prompt tuning": (
        lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, **VIRTUAL), "MULTITASK_PROMPT_TUNING"
    ),
}  # fmt: skip
FLOAT32 = "FourierFT", "C3A", "DEFT"  # compute in it, whatever the dtype
RING = "LoRA", "KaSA", "layers replicated", "prompt tuning"  # compared by a ring, too
PROMPTS = "prompt tuning", "a prompt of sampled tokens", "P-tuning"
UNLIKE = "aLoRA", "AdaLoRA", "VeLoRA", "Lily"  # if they were not refused
SIZES = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, vocab_size=150, tie_word_embeddings=True,
)  # fmt: skip


def mean_loss(logits, labels, **kwargs):
    """Hugging Face's, which computes in float32 whatever the model's dtype is."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def adapted(model, config):
    """A model under PEFT, in float64, whose adapters all do something."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, copy.deepcopy(config)).double().train()
    compute_in_float64(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def by_forward(model, ids, mesh):
    return model(input_ids=ids, labels=ids).loss


def by_shard_loss(model, ids, mesh, techniques=None):
    """The sum of the ranks' parts, with the gradients of this one's."""
    part = shard_loss(model, ids, mesh, techniques)
    total = part.detach().clone()
    dist.all_reduce(total)
    return part + (total - part.detach())


def by_techniques(model, ids, mesh):
    return by_shard_loss(
        model, ids, mesh, supported_techniques(base(model), Techniques(tile_tokens=5))[0]
    )


def base(model):
    return model.get_base_model()


def off(model, reference, loss_of, ids, mesh):
    """How far the loss, and the farthest gradient, are off, of the largest value of each."""
    model.zero_grad()
    loss = loss_of(model, ids, mesh)
    loss.backward()
    sum_gradients(trained(model).values(), mesh)
    mine, worst = trained(model), abs(loss / reference.loss - 1).item()
    for name, parameter in trained(reference).items():
        grad = mine[name].grad
        if parameter.grad is None:
            assert grad is None, name
        else:
            largest = parameter.grad.abs().max().clamp(min=1e-9)
            worst = max(worst, ((grad - parameter.grad).abs().max() / largest).item())
    return worst


def reference_of(whole, config, ids):
    """Plain PEFT on the whole model, with its gradients and, as an attribute, its loss."""
    model = adapted(copy.deepcopy(whole), config)
    base(model).loss_function = mean_loss
    model.loss = model(input_ids=ids, labels=ids).loss
    model.loss.backward()
    return model


def say(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


def refused(function, *args, message):
    try:
        function(*args)
    except ValueError as error:
        assert message in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    ids = torch.randint(SIZES["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))
    ids[:, 6:8] = torch.tensor(INVOCATION)
    whole, split = llama(), sequence_parallelize(llama(), mesh)
    ring = ring_parallelize(llama(), mesh)
    ways, lacking = (by_forward, by_shard_loss, by_techniques), {}

    def present(settings):
        """(name, config, messages) of what this version of PEFT has."""
        for name, (config, *messages) in settings.items():
            try:
                config = config()
            except (AttributeError, TypeError, ValueError) as error:
                lacking[name] = error
            else:
                yield name, config, messages

    for name, config, _ in present({name: [config] for name, config in RIGHT.items()}):
        try:
            reference = reference_of(whole, config, ids)
        except (AttributeError, RuntimeError, ValueError) as error:  # in older versions
            lacking[name] = error
            continue
        results = {}
        for kind in (split, ring) if name in RING else [split]:
            model = adapted(copy.deepcopy(kind), config)
            for way in ways[:2] if name == "LLaMA-Adapter" else ways:
                results[type(kind).__name__, way.__name__] = off(model, reference, way, ids, mesh)
        say(f"right: {name}", *(f"{result:.0e}" for result in results.values()))
        assert max(results.values()) < (1e-5 if name in FLOAT32 else 1e-10), (name, results)

    for name, config, messages in present(REFUSED | REFUSED_LOSS):
        for kind in (split, ring) if name == "aLoRA" else [split]:
            model = adapted(copy.deepcopy(kind), config)
            for way in ways[name in REFUSED_LOSS :]:
                message = messages[0 if way is by_forward else -1]
                refused(way, model, ids, mesh, message=message)
        say(f"refused: {name}")

    # A disabled prompt is none, as in PEFT's own forward.
    prompt = adapted(copy.deepcopy(split), RIGHT["prompt tuning"]())
    with prompt.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(by_shard_loss(prompt, ids, mesh), by_forward(prompt, ids, mesh))
    say("right: a prompt disabled")

    before = adapted(llama(), lora())
    sequence_parallelize(base(before), mesh)
    worst = max(off(before, reference_of(whole, lora(), ids), way, ids, mesh) for way in ways)
    say(f"right: LoRA before {worst:.0e}")
    assert worst < 1e-10

    # On slices of weights no adapter of a layer is right.
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("sp", "tp"))
    adalora = peft.AdaLoraConfig(
        total_step=10, tinit=1, tfinal=1, target_modules=["lm_head"], **CAUSAL
    )
    for slices in (
        partial(tensor_parallelize, mesh=mesh), partial(dtensor_parallelize, mesh=mesh),
        partial(parallelize_tp_sp, mesh=both),
    ):  # fmt: skip
        model = peft.get_peft_model(llama(), lora(target_modules=["lm_head"]))
        refused(slices, base(model), message="lora: PEFT's adapters do not know of slices")
        model = slices(llama())
        for config in lora(), lora(target_modules=["lm_head"]), adalora:
            adapted_copy = peft.get_peft_model(copy.deepcopy(model), config)
            refused(by_forward, adapted_copy, ids, mesh, message="do not know of slices of weights")
        for name in "CPT", "prefix tuning":
            config, message = REFUSED[name]
            prompt = peft.get_peft_model(copy.deepcopy(model), config())
            refused(by_forward, prompt, ids, mesh, message=message)
        # Prompts are: all ranks have the gradient, which no sum is needed for (over one rank).
        for name in PROMPTS:
            reference = reference_of(whole, RIGHT[name](), ids)
            prompt = adapted(copy.deepcopy(model), RIGHT[name]())
            result = off(prompt, reference, by_forward, ids, both["sp"])
            say(f"right: {name} of slices {result:.0e}")
            with tempfile.TemporaryDirectory() as folder:
                save_pretrained(prompt, folder)
                if dist.get_rank() == 0:  # plain PEFT opens what was saved
                    again = peft.PeftModel.from_pretrained(copy.deepcopy(whole), folder)
                    ours = prompt.get_prompt_embedding_to_save("default").float()
                    theirs = again.prompt_encoder["default"].embedding.weight.float()
                    assert ours.equal(theirs), f"{name} of slices, saved"
                dist.barrier()
            assert result < 1e-10, (name, result)
    say("refused: slices")

    # The negative control: what is refused, if it were not.
    adapters.KNOWN_ADAPTERS = adapters.KNOWN_ADAPTERS | {
        "ALoraLinearVariant", "adalora", "VeloraLinearVariant", "lily"
    }  # fmt: skip
    for name, config, _ in present({name: REFUSED[name] for name in UNLIKE}):
        model = adapted(copy.deepcopy(split), config)
        result = off(model, reference_of(whole, config, ids), by_forward, ids, mesh)
        say(f"unlike: {name} {result:.0e}")
        assert result > 1e-3, (name, result)

    for name, error in lacking.items():
        say(f"lacking: {name}, {error}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    main()
