"""Mistral, Qwen2, Qwen3 and SmolLM3, in every check of Tasks 2 to 5, the KV cache and the ring. A
model is known by its parts: what has others is refused by their names.
"""

import pytest
import torch
import transformers

import launch
from conftest import make_llama
from guards.refusals import check_layers, check_ordinary
from loading.architectures import LLAMAS, count_parameters
from loading.models import Source
from planting import plant

SCRIPTS = {
    "tp_llama": ["--repeats", 0], "dtensor_llama": ["--repeats", 0],
    "kv_cache": ["--repeats", 0, "--new-tokens", 5], "ulysses_forward": ["--repeats", 0],
    "ring_attention": ["--repeats", 0, "--seq-len", 23], "ulysses_finetune": ["--steps", 2],
}  # fmt: skip
# What its own configuration says, beside the sizes of `make_llama`.
PLAIN = dict(attention_bias=None, mlp_bias=None)
KINDS = {
    "mistral": ("Mistral", PLAIN | dict(sliding_window=None)),
    "qwen2": ("Qwen2", PLAIN | dict(head_dim=None, hidden_size=48)),
    "qwen3": ("Qwen3", dict(mlp_bias=None)),
    "smollm3": ("SmolLM3", dict(head_dim=None, hidden_size=48, no_rope_layer_interval=2)),
}
ONCE = {("qwen3", "tp_llama", 4), ("qwen3", "ulysses_finetune", 2)}  # in `make test-all`


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that saves a small random model of a kind, with more settings, and says where."""

    def make(kind, **more):
        name, settings = KINDS[kind]
        if not hasattr(transformers, f"{name}Config"):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        return make_llama(tmp_path_factory.mktemp(kind), name, **settings | more)

    return make


def start(script, folder, nproc, dtype, tmp_path, tasks=launch.TASKS):
    args = ["--model", folder, "--dtype", dtype, *SCRIPTS[script]]
    return launch.ranks(tasks / f"{script}.py", *args, nproc=nproc, folder=tmp_path)


@pytest.mark.parametrize(
    ("kind", "script", "nproc"),
    [
        pytest.param(*which, marks=[] if which in ONCE else pytest.mark.stress)
        for kind in KINDS
        for script in SCRIPTS
        for which in [(kind, script, nproc) for nproc in (1, 2, 3, 4)]
    ],
)
def test_float64(kind, script, nproc, folder_of, tmp_path):
    result = start(script, folder_of(kind), nproc, "float64", tmp_path)
    assert result.code == 0, result.tail()
    assert result.out.count("Tests passed (rank=") == nproc, result.tail()


@pytest.mark.stress
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind, script, dtype, folder_of, tmp_path):
    result = start(script, folder_of(kind), 2, dtype, tmp_path)
    assert result.code == 0, result.tail()


@pytest.mark.stress
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_and_saved(kind, nproc, folder_of, tmp_path):
    """By each technique, and on a mesh of two axes: norm, clipping, full state, folder."""
    # SmolLM3's layers without RoPE have keys' biases whose gradient is 0: rounding is all of it.
    folder = folder_of(kind, **{"attention_bias": None} if kind == "smollm3" else {})
    names = ["TP", "DTensor", "Ulysses", "ring", "FSDP2", *["TP x DP"] * (nproc == 4)]
    (tmp_path / "models").mkdir()
    args = [launch.TASKS, folder, tmp_path / "models", "float64", "full", *names]
    path = launch.HELPERS / "full_model.py"
    result = launch.ranks(path, *args, nproc=nproc, folder=tmp_path / "models")
    assert result.code == 0, result.tail()


BUGS = {
    "a head's norm has its own rank's gradient": (
        "tp_llama", "utils/shards.py", 'copy_to_region(self._parameters["weight"], '
        "self.get_group())", 'self._parameters["weight"]', "qwen3",
    ),
    "heads without their norm, in parts": (
        "ulysses_finetune", "memory/long_sequence.py", 'hasattr(attention, "q_norm")', "False",
        "qwen3",
    ),
    "all layers have RoPE, in parts": (
        "ulysses_finetune", "memory/long_sequence.py", 'getattr(attention, "use_rope", True)',
        "True", "smollm3",
    ),
    "a bias keeps the first rows": (
        "tp_llama", "utils/shards.py", "region[dim] = slice(first + start, first + stop)",
        'first -= start * (name == "bias")\n'
        "            region[dim] = slice(first + start, first + stop)", "qwen2",
    ),
    "a window is not looked at": (
        "ulysses_forward", "utils/sequence.py", "if window is not None and length > window:",
        "if False:", "mistral",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.stress] * (i > 0)) for i, n in enumerate(BUGS)]
)
def test_planted_bug(name, folder_of, tmp_path):
    script, module, right, wrong, kind = BUGS[name]
    plant(tmp_path, module, right, wrong)
    folder = folder_of(kind, **dict(sliding_window=4) if kind == "mistral" else {})
    result = start(script, folder, 2, "float64", tmp_path, tmp_path)
    assert result.code == 1 and "FAILED " in result.out, result.tail()


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=[pytest.mark.stress] * (s != "ulysses_forward")) for s in SCRIPTS],
)
def test_sliding_window(script, folder_of, tmp_path):
    """Right where heads alone are split; where tokens are, or are cached, it is refused."""
    folder = folder_of("mistral", sliding_window=4)
    result = start(script, folder, 2, "float64", tmp_path)
    if script in ("tp_llama", "dtensor_llama"):
        assert result.code == 0, result.tail()
    else:
        result.assert_refused("sliding_window 4: ")


@pytest.mark.stress
@pytest.mark.parametrize("script", ["ulysses_forward", "ring_attention", "ulysses_finetune"])
def test_window_longer_than_the_sequence(script, folder_of, tmp_path):
    """It hides nothing."""
    folder = folder_of("mistral", sliding_window=300)
    assert start(script, folder, 2, "float64", tmp_path).code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted(kind, folder_of):
    source = Source(str(folder_of(kind)), model_types=LLAMAS)
    exact = sum(parameter.numel() for parameter in source.empty_model().parameters())
    assert count_parameters(source.config) == exact


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Olmo2", "layer of Olmo2ForCausalLM has post_feedforward_layernorm and has no input_lay"),
        ("Phi3", "a layer of Phi3ForCausalLM has resid_attn_dropout, resid_mlp_dropout"),
        ("Gemma2", "has post_feedforward_layernorm, pre_feedforward_layernorm"),
        ("Mixtral", "MixtralForCausalLM has "),
        ("GPT2", "GPT2LMHeadModel has transformer and has no model"),
    ],
)
def test_built_otherwise(name, said):
    """Refused by the part that is not known, or missing."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    if name != "GPT2":
        sizes |= dict(intermediate_size=16, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
                      eos_token_id=2)  # fmt: skip
    model_class = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, model_class)(config)
    with pytest.raises(ValueError, match="not built as a LlamaForCausalLM: ") as refused:
        check_ordinary(model)
    assert said in str(refused.value)


def test_layers_that_do_more():
    """Gemma's embedding scales its rows, in transformers 5: slices of it would not."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    config = transformers.GemmaConfig(**sizes, intermediate_size=16, num_key_value_heads=2)
    with torch.device("meta"):
        gemma = transformers.GemmaForCausalLM(config)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    check_layers(llama)
    if type(gemma.model.embed_tokens) is not torch.nn.Embedding:  # by the library's version
        check_ordinary(gemma)
        with pytest.raises(
            ValueError, match=r"model.embed_tokens is a \w+: slices are taken of an"
        ):
            check_layers(gemma)
    llama.model.layers[0].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match="up_proj is a Linear4bit: slices"):
        check_layers(llama)


def test_norms_of_all_heads_together():
    """They need other ranks' heads."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**sizes, intermediate_size=16, num_key_value_heads=2)
        )
        check_ordinary(model)
        model.model.layers[0].self_attn.q_norm = torch.nn.RMSNorm(32)
    with pytest.raises(ValueError, match="q_norm is of 32, not of a head's 8"):
        check_ordinary(model)


def test_heads_that_do_not_divide():
    """transformers says so only in a forward; a slice of such a model would lose query heads."""
    config = transformers.LlamaConfig(
        num_attention_heads=6, num_key_value_heads=4, head_dim=8, hidden_size=48,
        intermediate_size=16, num_hidden_layers=1, vocab_size=11,
    )  # fmt: skip
    with pytest.raises(ValueError, match="6 query heads do not divide by 4 KV heads"):
        check_ordinary(transformers.LlamaForCausalLM(config))
