"""Random small models in random directories: what transformers loads and computes, and what we do.

Arguments: the folder of the scripts' code, one for the directories, the first seed, and how many
seeds. All ranks draw the same.
Of each seed, in this order:

1. Our loader's parameters, logits and generation settings are `from_pretrained`'s, to the bit.
2. Each rank's slices, for Task 2 and for Task 4, are slices of those, to the bit.
3. In float64 both tasks have the library's logits, its loss, and all of its gradients.

At the first failure the seed is printed, and the directory's config.json.
"""

import os
import random
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, sys.argv[1])
from harness.float64 import compute_in_float64
from loading.models import TRANSFORMERS_4, Source
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.errors import UserError
from utils.llama import rope_of
from utils.replicas import sum_gradients
from utils.shards import shard_of

CPU = torch.device("cpu")  # behind the imports above: those below put other folders first

sys.path.append(str(Path(__file__).resolve().parents[1]))
from conftest import make_llama  # noqa: E402
from damage import change_config, change_tensors, shard  # noqa: E402
from spellings import (  # noqa: E402
    SCALINGS,
    SPELLINGS,
    as_half,
    assert_same_as_the_library,
    change_rope,
    copy_over_shards,
    drop_settings,
    generation,
    resave_in_one_file,
)

BOUND = 1e-10  # times the largest value, or 1 where that is smaller: the scripts' own, in float64


def main(folder, first, count):
    """Of all seeds the directories, then the checks."""
    logging.disable_progress_bar()
    rank, P = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    directories = {seed: Path(folder) / f"seed{seed}" for seed in range(first, first + count)}
    # Before there is a process group, for then transformers would save on rank 0 alone.
    for seed in range(first + rank, first + count, P):
        make_directory(directories[seed], seed)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (P,), mesh_dim_names=("ranks",))
    dist.barrier()
    for seed, directory in directories.items():
        try:
            check(directory, seed, mesh)
        except Exception:
            print(f"seed {seed}: {(directory / 'config.json').read_text()}")
            raise
    print(f"{count} models, from seed {first} on")


# ---------------------------------------------------------------- directories


def make_directory(directory, seed):
    """A Llama of random sizes, in a directory of random settings and files."""
    chance = random.Random(seed)

    def maybe(share=0.5):
        return chance.random() < share

    kv_heads = chance.randint(1, 4)
    heads = kv_heads * chance.randint(1 + (kv_heads == 1), 3)  # at least 2, for 2 ranks
    head_dim, says_head_dim = 2 * chance.randint(2, 8), maybe()
    vocab_size = chance.randint(2, 300)
    tied = maybe()
    settings = dict(
        hidden_size=heads * (chance.randint(1, 16) if says_head_dim else head_dim),
        num_hidden_layers=chance.randint(1, 3),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=chance.randint(2, 70),
        vocab_size=vocab_size,
        max_position_embeddings=chance.randint(40, 300),
        tie_word_embeddings=tied,
        attention_bias=maybe(),
        mlp_bias=maybe(),
        rms_norm_eps=chance.choice([1e-6, 1e-5, 0.03]),
        hidden_act=chance.choice(["silu", "gelu", "relu", "gelu_pytorch_tanh"]),
        pad_token_id=chance.choice([None, 0, chance.randrange(vocab_size)]),
    )
    make_llama(directory, **settings)
    if not says_head_dim:
        drop_settings(directory, "head_dim")
    if heads == kv_heads and maybe():
        drop_settings(directory, "num_key_value_heads")
    if not tied and maybe():
        drop_settings(directory, "tie_word_embeddings")
    change_rope(directory, random_rope(chance, head_dim))
    random_files(directory, chance, tied)
    random_extras(directory, chance, vocab_size)


def random_rope(chance, head_dim):
    """A type of RoPE in the spelling of a version of transformers."""
    kind = chance.choice(list(SCALINGS))
    scaling = dict(SCALINGS[kind])
    if kind == "longrope":
        for name in "short_factor", "long_factor":
            scaling[name] = [chance.uniform(1, 8) for _ in range(head_dim // 2)]
    readable = [name for name, (newer, _) in SPELLINGS.items() if not (newer and TRANSFORMERS_4)]
    if TRANSFORMERS_4 and kind == "default":
        readable.remove("4, type")
    _, settings = SPELLINGS[chance.choice(readable)]
    return settings(scaling)


def random_files(directory, chance, tied):
    """The weights' dtype, and which files they are in."""
    if chance.random() < 0.4:
        change_tensors(directory, as_half)
    if tied and chance.random() < 0.3:  # the head as well

        def with_head(tensors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        change_tensors(directory, with_head)
    files = [lambda _: None, shard, resave_in_one_file, copy_over_shards]
    chance.choice(files)(directory)


def random_extras(directory, chance, vocab_size):
    """What config.json says of dtypes, or what is none of a Llama's; generation settings."""
    if chance.random() < 0.5:
        drop_settings(directory, "dtype", "torch_dtype")
    if chance.random() < 0.5:
        name = chance.choice(["dtype", "torch_dtype"])
        change_config(directory, **{name: chance.choice(["float32", "bfloat16", "float16"])})
    more = dict(
        use_cache=False, pretraining_tp=1, lora_rank=8, attention_dropout=0.1,
        output_hidden_states=True, _attn_implementation="eager", initializer_range=0.5,
        architectures=["LlamaForCausalLM"], partial_rotary_factor=1.0,
    )  # fmt: skip
    names = chance.sample(list(more), chance.randint(0, 3))
    change_config(directory, **{name: more[name] for name in names})
    path = directory / "generation_config.json"
    if chance.random() < 0.3:
        path.unlink(missing_ok=True)
    elif chance.random() < 0.5:
        generation(directory, eos_token_id=[chance.randrange(vocab_size)], repetition_penalty=1.2)


# ---------------------------------------------------------------- what is compared


def check(directory, seed, mesh):
    """All that the docstring of this file says of one seed."""
    assert_same_as_the_library(directory)
    chance, source = random.Random(f"batch {seed}"), Source(str(directory))
    torch.manual_seed(seed)
    inputs, labels = random_batch(chance, source.config.vocab_size)
    dtype = {"torch_dtype" if TRANSFORMERS_4 else "dtype": torch.float64}
    theirs = AutoModelForCausalLM.from_pretrained(directory, **dtype).eval()
    theirs.config._attn_implementation = "sdpa"
    own_loss = theirs(**inputs, labels=labels).loss
    compute_in_float64(theirs)
    logits = theirs(**inputs).logits
    loss = cross_entropy(logits, labels)
    # The library's own, of which norms, rotary tables and the loss are in float32.
    assert_close("the library's loss", own_loss, loss, 1e-5)
    loss.backward()
    whole_vocabulary = partial(tensor_parallelize, vocab_parallel=False)
    for split in tensor_parallelize, whole_vocabulary, sequence_parallelize:
        by_tokens = split is sequence_parallelize
        if by_tokens and rope_of(source.config).get("rope_type") in ("dynamic", "longrope"):
            try:
                source.load_model(torch.float64, CPU, partial(split, mesh=mesh))
            except UserError as error:
                assert "depends on the sequence's length" in str(error)
                continue
            raise AssertionError("RoPE that depends on the length")
        model = source.load_model(torch.float64, CPU, partial(split, mesh=mesh))
        for name, parameter in model.named_parameters():
            expected = theirs.get_parameter(name)[shard_of(parameter)]
            assert torch.equal(parameter, expected), f"slice of {name}"
        real = inputs["attention_mask"][..., None]  # padding positions are ignored
        with torch.no_grad():
            assert_close("logits", model(**inputs).logits * real, logits * real)
        if split is whole_vocabulary:  # its loss is the library's own, in float32
            ours = cross_entropy(model(**inputs).logits, labels)
        else:
            ours = model(**inputs, labels=labels).loss
        assert_close("loss", ours, loss)
        ours.backward()
        if by_tokens:
            sum_gradients(model.parameters(), mesh)
        for name, parameter in model.named_parameters():
            expected = theirs.get_parameter(name).grad[shard_of(parameter)]
            assert_close(f"gradient of {name}", parameter.grad, expected)


def random_batch(chance, vocab_size):
    """Inputs and labels, (B, S); the last of several sequences may be padded on the left."""
    ids = torch.randint(vocab_size, (chance.randint(1, 3), chance.randint(3, 13)))
    mask, labels = torch.ones_like(ids), ids.clone()
    if len(ids) > 1 and chance.random() < 0.5:
        padding = chance.randint(1, ids.shape[1] - 2)
        mask[-1, :padding] = 0
        labels[-1, : padding + 1] = -100  # no token is predicted from padding, either
    return dict(input_ids=ids, attention_mask=mask), labels


def cross_entropy(logits, labels):
    """The mean next-token loss by PyTorch."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def assert_close(name, actual, expected, bound=BOUND):
    off, most = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert off <= bound * max(1, most), f"{name}: off by {off:.1e}, largest {most:.1e}"


if __name__ == "__main__":
    main(sys.argv[2], *map(int, sys.argv[3:]))
