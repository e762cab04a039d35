"""The parts in one process: who owns what, loading, flags."""

import ast
import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import launch
from conftest import make_llama
from harness import environment, job, measure
from harness.checks import NAME_WIDTH, covered, shortened
from harness.model_checks import number_of_parameters
from harness.terminal import styled
from loading.architectures import DROPOUTS, LLAMA_AND_GPT2, count_parameters, restore_dropout
from loading.models import TINY, Source
from loading.presets import LLAMA3_ROPE, PRESETS
from utils.partition import shard_heads, shard_range
from utils.sequence import MaskInfo
from utils.shards import keep_shard, shard_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("items", [1, 7, 8, 53])
def test_shard_range(items):
    """Shares lie end to end and differ by one at most."""
    for parts in range(1, 10):
        shares = [shard_range(items, parts, index) for index in range(parts)]
        assert shares[0][0] == 0 and shares[-1][1] == items
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
        sizes = {stop - start for start, stop in shares}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (32, 8), (6, 3), (12, 3), (4, 1)])
def test_shard_heads(heads, kv_heads):
    """Every query head is owned once, beside its own KV head, in groups of equal size."""
    group = heads // kv_heads
    for ranks in range(1, heads + 1):
        owned = []
        for rank in range(ranks):
            queries, keys, holders = shard_heads(heads, kv_heads, ranks, rank)
            mine = range(*queries)
            assert mine and {head // group for head in mine} == set(range(*keys))
            assert len(mine) % (keys[1] - keys[0]) == 0
            same = [r for r in range(ranks) if shard_heads(heads, kv_heads, ranks, r)[1] == keys]
            assert list(range(*holders)) == same
            owned += mine
        assert owned == list(range(heads))
    with pytest.raises(ValueError, match=f"use 1 to {heads} ranks, not {heads + 1}"):
        shard_heads(heads, kv_heads, heads + 1, 0)


def region(*of_dims):
    return tuple(slice(*of_dim) for of_dim in of_dims)


def test_shard_of_a_shard():
    """What is sliced twice knows where it lies in the whole; a bias knows its only dim."""
    layer = torch.nn.Linear(6, 10)
    whole, bias = layer.weight.detach(), layer.bias.detach()
    assert shard_of(layer.weight) == region((0, 10), (0, 6))
    keep_shard(layer, 0, 2, 8)
    keep_shard(layer, 1, 1, 4)
    keep_shard(layer, 0, 1, 3)
    assert shard_of(layer.weight) == region((3, 5), (1, 4))
    assert shard_of(layer.bias) == region((3, 5))
    assert torch.equal(layer.weight, whole[3:5, 1:4]) and torch.equal(layer.bias, bias[3:5])


def test_covered():
    """Regions that leave nothing out, on a mesh of two axes too; and such that do."""
    quarters = [region((0, 3), (0, 4)), region((0, 3), (4, 5)), region((3, 4), (0, 4))]
    assert not covered((4, 5), quarters)
    assert covered((4, 5), [*quarters, region((3, 4), (4, 5)), region((4, 4), (0, 5))])
    assert covered((4, 5), [*quarters, region((2, 4), (3, 5))])  # some of it twice
    assert covered((7,), [region((2, 7)), region((0, 2))]) and covered((7,), [region((0, 7))] * 2)
    assert not covered((7,), [region((3, 7)), region((0, 2))]) and not covered((7,), [])


TWO_AXES = """
import sys
sys.path.insert(0, {tasks!r})
import copy, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import LlamaForCausalLM
from dtensor_llama import dtensor_parallelize
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients
from utils.shards import shard_of
from shared_memory.group import NAME
from shared_memory.slots import neighbourhood

if __name__ == "__main__":
    dist.init_process_group(NAME if neighbourhood() else "gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    here, everything = mesh.get_coordinate(), Replicate()
    for size in (8, 6), (7, 5), (3, 1):
        whole = torch.arange(1.0, 1 + size[0] * size[1]).view(size)
        for on_axes in (
            [Shard(0), everything], [everything, Shard(0)], [everything, everything],
            [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)],
        ):
            part = distribute_tensor(whole, mesh, on_axes)
            assert torch.equal(whole[shard_of(part)], part.to_local()), (size, on_axes)
    uneven = shard_of(distribute_tensor(torch.ones(7, 5), mesh, [Shard(0), Shard(1)]))
    assert uneven == (slice(*((0, 4), (4, 7))[here[0]]), slice(*((0, 3), (3, 5))[here[1]]))
    twice = shard_of(distribute_tensor(torch.ones(7, 5), mesh, [Shard(0), Shard(0)]))
    rows = ((0, 2), (2, 4)), ((4, 6), (6, 7))
    assert twice == (slice(*rows[here[0]][here[1]]), slice(0, 5))

    whole = LlamaForCausalLM.from_pretrained({model!r}).float()
    for axis, parallelize in (
        ("tp", tensor_parallelize), ("tp", dtensor_parallelize), ("sp", sequence_parallelize),
    ):
        try:
            parallelize(copy.deepcopy(whole), mesh)
        except ValueError as error:
            assert "2 axes" in str(error)
        else:
            raise AssertionError("a mesh of two axes")
        model = parallelize(copy.deepcopy(whole), mesh[axis])
        # On the other axis ranks have different tokens: a sum over both would mix them.
        ids = torch.arange(2 * 9).view(2, 9) + 100 * here[axis == "sp"]
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=1e-4)
        whole.zero_grad()
        for m in (model, whole):
            m(ids, labels=ids).loss.backward()
        if axis == "sp":
            sum_gradients(model.parameters(), mesh["sp"])
        actual, expected = (m.model.norm.weight.grad for m in (model, whole))
        largest = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * largest)
    dist.destroy_process_group()
    print("on both axes")
"""


def test_mesh_of_two_axes(tmp_path):
    """2 x 2 ranks: who holds what of a DTensor, and each technique on an axis of its own."""
    script = TWO_AXES.format(tasks=str(launch.TASKS), model=str(TINY))
    (tmp_path / "axes.py").write_text(script)
    result = launch.ranks(tmp_path / "axes.py", nproc=4, folder=tmp_path)
    assert result.code == 0 and result.out.count("on both axes") == 4, result.tail()


ROPE = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPE)
def test_reference_is_hugging_faces_model(kind, tmp_path):
    """Our loader gives, to the bit, what the library's own gives; in float64, to its float32."""
    make_llama(tmp_path, rope_scaling=ROPE[kind], max_position_embeddings=40, rms_norm_eps=0.03)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).float()
    source = Source(str(tmp_path))
    ours, exact = source.load_model(torch.float32, CPU), source.load_model(torch.float64, CPU)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
    ids = torch.arange(2 * 100).view(2, 100)  # longer than all of these were made for
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert (exact(ids).logits - theirs(ids).logits).abs().max() < 1e-4


def test_tiny_is_what_hugging_face_loads():
    theirs, ids = LlamaForCausalLM.from_pretrained(TINY).float(), torch.arange(40)[None]
    ours = Source("tiny").load_model(torch.float32, CPU)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_random_weights_do_not_depend_on_slices():
    source = Source("random/small", num_layers=1, seed=3)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = source.read(name)
        ranges = [((0, 7), (5, 200), (size - 9, size), (0, size)) for size in whole.shape]
        for part in itertools.starmap(region, itertools.product(*ranges)):
            assert torch.equal(source.read(name, part), whole[part])
    assert not torch.equal(whole, Source("random/small", 1, seed=4).read(name))


@pytest.mark.parametrize(
    ("name", "count"), [("llama-3.2-1b", 1_235_814_400), ("llama-3.1-8b", 8_030_261_248)]
)
def test_presets_have_the_real_sizes(name, count):
    assert sum(p.numel() for p in Source(f"random/{name}").empty_model().parameters()) == count


@pytest.mark.parametrize(("preset", "count"), [("gpt2", 124_439_808), ("gpt2-small-test", 63_168)])
def test_presets_of_gpt2(preset, count):
    """The real one is the library's own; its parameters are counted by a formula, too."""
    source = Source(f"random/{preset}", model_types=LLAMA_AND_GPT2)
    assert type(source.empty_model()).__name__ == "GPT2LMHeadModel"
    assert count_parameters(source.config) == number_of_parameters(source) == count
    if preset == "gpt2":
        own = GPT2Config(**dict.fromkeys(DROPOUTS, 0.0))
        settings = [
            {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
            for config in (source.config, own)
        ]
        assert settings[0] == settings[1]


def test_dropout_of_gpt2():
    """None where runs are compared; as shipped where the source is asked for it again."""
    source, ids = (
        Source("random/gpt2-small-test", model_types=LLAMA_AND_GPT2),
        torch.arange(20)[None],
    )

    def outputs():
        model = source.load_model(torch.float32, CPU).train()
        return [model(ids).logits for _ in range(2)]

    assert torch.equal(*outputs()) and set(source.dropout.values()) == {0.1}
    restore_dropout(source)
    assert not torch.equal(*outputs())


def test_float64_of_gpt2():
    """With a padding mask, which transformers 4 makes in the default dtype; that stays as it is."""
    source, ids = (
        Source("random/gpt2-small-test", model_types=LLAMA_AND_GPT2),
        torch.arange(8).view(2, 4),
    )
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    exact, plain = (source.load_model(dtype, CPU) for dtype in (torch.float64, torch.float32))
    y, expected = (model(ids, attention_mask=mask).logits[mask == 1] for model in (exact, plain))
    assert y.dtype == torch.float64 and torch.get_default_dtype() == torch.float32
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=1e-6)
    with pytest.raises(IndexError):
        exact(ids + 10**6)
    assert torch.get_default_dtype() == torch.float32


def test_float64_is_float64():
    """With norms and rotary tables in float64, and close to the float32 model."""
    ids = torch.arange(30)[None]
    source = Source("random/small", num_layers=2)
    with torch.no_grad():
        exact = source.load_model(torch.float64, CPU)(ids).logits
        plain = source.load_model(torch.float32, CPU)(ids).logits
        rounded = source.load_model(torch.float64, CPU)
        rounded.model.norm = source.load_model(torch.float32, CPU).double().model.norm
    assert exact.dtype == torch.float64
    assert 0 < (exact - plain).abs().max() < 1e-4
    assert (exact - rounded(ids).logits).abs().max() > 1e-9  # what the library's norm rounds away


def test_rope_of_task_1():
    """What it calls Llama-3.2-1B has that model's RoPE: theta 500,000, low frequencies / 32."""
    rope = LlamaRotaryEmbedding(LlamaConfig(**PRESETS["llama-3.2-1b"]))
    plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    turns = 8192 * plain / (2 * torch.pi)  # in the context that it was trained with at first
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    torch.testing.assert_close(rope.inv_freq, plain * (kept + (1 - kept) / 32))


@pytest.mark.parametrize("script", launch.SCRIPTS)
def test_help_and_flags(script, tmp_path):
    """Each flag has a help text with its default, and torchrun takes none for its own."""
    file = launch.TASKS / f"{script}.py"
    result = launch.ranks(file, "--help", nproc=1, folder=tmp_path, torchrun=False)
    assert result.code == 0 and not result.err, result.tail()
    text = result.out
    options = text[text.index("\noptions:") :]
    flags = re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", options, re.M)
    assert {"--model", "--dtype", "--device", "--seed", "--json", "--num-layers"} <= set(flags)
    for flag, entry in zip(flags, re.split(r"^  (?=-)", options, flags=re.M)[1:], strict=True):
        assert flag == "--help" or "default" in entry, entry
        for words in ([flag], [flag, "x"], [f"{flag}=x"]):
            parsed = get_args_parser().parse_args(["script.py", *words])
            assert parsed.training_script_args == words


def test_tiny_llama():
    """The embedded model is small, complete, and has sizes that differ from one another."""
    assert sum(path.stat().st_size for path in TINY.iterdir() if path.is_file()) <= 8_000_000
    source = Source("tiny")
    config, tokenizer = source.config, source.tokenizer()
    sizes = [config.hidden_size, config.num_hidden_layers, config.num_attention_heads]
    sizes += [config.num_key_value_heads, config.head_dim, config.intermediate_size]
    sizes += [config.vocab_size, config.max_position_embeddings]
    assert len(set(sizes)) == len(sizes) and config.max_position_embeddings >= 2048
    text = "Ünïcode, 中文 and a quick brown fox\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    evaluation = json.loads((TINY / "evaluation.json").read_text())
    assert evaluation["held_out"]["stories_2048"]["perplexity"] < 5
    assert set(PRESETS) >= {"small", "llama-3.2-1b", "llama-3.1-8b"}


def test_fewer_gpus_than_ranks(monkeypatch, capsys):
    """--device auto goes to the CPU, and says so; --device cuda is refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", sys.exit)
    device, notice = environment.choose_device("auto")
    assert device.type == "cpu" and "2 ranks but 1 GPU(s)" in notice
    with pytest.raises(SystemExit, match="2"):
        environment.choose_device("cuda")
    assert "error: --device cuda: 2 ranks but 1 GPU(s)" in capsys.readouterr().err
    # One that its driver does not make usable.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert environment.choose_device("auto") == (CPU, None)


@pytest.mark.parametrize("same", [True, False])
def test_gpus_that_differ(same, monkeypatch):
    """Their bits may; that is said, and not refused."""
    names = iter(["GPU A", "GPU A" if same else "GPU B"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: next(names))
    for notes, *_ in agreed_by_two():
        notes = [note for note in notes if "different GPUs" in note]
        assert notes == [] if same else "GPU B from rank" in notes[0]


def agreed_by_two():
    """What `agree` says to each of two ranks on a GPU."""
    store, args = torch.distributed.HashStore(), SimpleNamespace(timeout=9)
    with ThreadPoolExecutor(2) as ranks:
        agreed = [ranks.submit(environment.agree, store, rank, 2, args, torch.device("cuda", 0))
                  for rank in range(2)]  # fmt: skip
    return [rank.result() for rank in agreed]


UNSET = "NCCL_MULTI_RANK_GPU_ENABLE is not 1"
SHARING = [
    # of each rank (ranks and GPUs of its machine, whether allowed, NCCL): backend, reason
    ([(2, 1, True, "2.32.3")] * 2, "nccl", "2 ranks share 1 GPU(s) by NCCL 2.32.3"),
    ([(4, 2, True, "2.30.0")] * 4, "nccl", "4 ranks share 2 GPU(s) by NCCL 2.30.0"),
    ([(2, 1, True, "2.29.7")] * 2, "gloo", "host: NCCL 2.29.7 is older than 2.30"),
    ([(2, 1, True, "2.9.0")] * 2, "gloo", "host: NCCL 2.9.0 is older than 2.30"),
    ([(2, 1, False, "2.32.3")] * 2, "gloo", f"host: {UNSET}"),
    ([(2, 1, False, "2.28.9")] * 2, "gloo", f"{UNSET} and NCCL 2.28.9 is older than 2.30"),
    ([(2, 1, True, None)] * 2, "gloo", "host: this PyTorch has no NCCL"),
    # A GPU for each rank: as without --share-gpus.
    ([(2, 2, False, "2.28.9")] * 2, "nccl", None),
    ([(1, 1, False, "2.28.9")], "nccl", None),
    # Ranks, or machines, that differ.
    ([(2, 1, True, "2.32.3"), (2, 1, False, "2.32.3")], "gloo", f"host: on rank 1 {UNSET}"),
    ([(1, 1, False, "2.32.3"), *[(2, 1, True, "2.32.3")] * 2], "gloo", f"on rank 0 {UNSET}"),
    ([(1, 1, True, "2.32.3"), *[(2, 1, True, "2.32.3")] * 2], "nccl", "2 ranks share 1 GPU(s)"),
    ([(2, 1, True, "2.32.3"), (2, 1, True, "2.29.7")], "gloo", "on rank 1 NCCL 2.29.7 is older"),
    ([(2, 1, True, "2.32.3"), (2, 1, True, "2.30.7")], "gloo",
     "the ranks have different versions of NCCL, 2.30.7 and 2.32.3"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "backend", "why"), SHARING)
def test_backend_of_ranks_that_share_a_gpu(ranks, backend, why):
    sharing = [environment.Sharing(*rank) for rank in ranks]
    on_gpus, args = torch.device("cuda", 0), SimpleNamespace(share_gpus=True, gloo=False)
    chosen, note = job.choose_backend(args, on_gpus, True, sharing)
    assert chosen == backend and (note is why or why in note), note
    # It matters neither on the CPU nor without the flag.
    if job.USABLE:
        assert job.choose_backend(args, CPU, True, sharing) == (job.NAME, None)
    args.share_gpus = False
    assert job.choose_backend(args, on_gpus, True, sharing) == ("nccl", None)


def test_shared_memory_of_an_old_pytorch(monkeypatch):
    """Its functional collectives would wait for ever: gloo, and it is said."""
    monkeypatch.setattr(job, "USABLE", False)
    args = SimpleNamespace(share_gpus=False, gloo=False)
    backend, note = job.choose_backend(args, CPU, True, [])
    assert backend == "gloo" and "from 2.7 on" in note


@pytest.mark.parametrize(("allowed", "backend"), [("11", "nccl"), ("10", "gloo"), ("00", "gloo")])
def test_ranks_agree_on_a_backend(allowed, backend, monkeypatch):
    """Each knows its own environment alone; both choose alike."""
    left = [environment.Sharing(2, 1, one == "1", "2.32.3") for one in allowed]
    monkeypatch.setattr(environment.Sharing, "of_this_rank", left.pop)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU A")
    args = SimpleNamespace(share_gpus=True)
    chosen = [job.choose_backend(args, torch.device("cuda", 0), False, sharing)
              for _, _, sharing in agreed_by_two()]  # fmt: skip
    assert chosen[0] == chosen[1] and chosen[0][0] == backend


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("0", False), ("", False)])
def test_what_a_rank_knows_of_sharing(value, allowed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(environment, "nccl_version", lambda: "2.32.3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
    assert environment.Sharing.of_this_rank() == environment.Sharing(3, 1, allowed, "2.32.3")


def test_version_of_nccl(monkeypatch):
    """The loaded library's, which need not be the one that PyTorch was built with."""

    def store(code, at):
        at._obj.value = code

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for code, version in ((23203, "2.32.3"), (22809, "2.28.9"), (23000, "2.30.0")):
        library = SimpleNamespace(ncclGetVersion=partial(store, code))
        monkeypatch.setattr(environment, "find_spec", lambda _: SimpleNamespace(origin="torch"))
        monkeypatch.setattr(environment.ctypes, "CDLL", {"torch": library}.get)
        assert environment.nccl_version() == version
    # Linked into PyTorch, and hidden.
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert environment.nccl_version() == "2.29.7"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert environment.nccl_version() is None


NCCL_LOADED = """
import sys
sys.path.insert(0, {tasks!r})
from types import SimpleNamespace
import torch
from harness import environment
environment.find_spec = lambda _: SimpleNamespace(origin={needs_nccl!r})
torch.distributed.is_nccl_available = lambda: True
print("loaded", environment.nccl_version())
"""


def test_another_nccl_is_loaded(tmp_path):
    """By LD_PRELOAD, in place of the one that PyTorch's own library needs."""
    if torch.distributed.is_nccl_available():  # made-up ones could not stand for the real one
        own = ".".join(map(str, torch.cuda.nccl.version()))
        assert environment.nccl_version() == own or "LD_PRELOAD" in os.environ
        return
    if sys.platform != "linux" or not shutil.which("gcc"):
        pytest.skip("no gcc here, or no LD_PRELOAD: no library can stand for NCCL's")
    for folder, code in (("wheel", 22907), ("newer", 23203)):
        (tmp_path / folder).mkdir()
        (tmp_path / f"{folder}.c").write_text(
            f"int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}"
        )
        flags = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o"]
        library = tmp_path / folder / "libnccl.so.2"
        assert launch.run(["gcc", *flags, library, tmp_path / f"{folder}.c"]).code == 0
    (tmp_path / "needs.c").write_text("int none;")
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path / 'wheel'}", "-o"]
    needs = tmp_path / "needs_nccl.so"
    words = ["gcc", *flags, needs, tmp_path / "needs.c", tmp_path / "wheel" / "libnccl.so.2"]
    assert launch.run(words).code == 0
    (tmp_path / "ask.py").write_text(
        NCCL_LOADED.format(tasks=str(launch.TASKS), needs_nccl=str(needs))
    )
    for env, version in (
        ({}, "2.29.7"), ({"LD_PRELOAD": str(tmp_path / "newer" / "libnccl.so.2")}, "2.32.3"),
    ):  # fmt: skip
        result = launch.run([sys.executable, tmp_path / "ask.py"], env=env)
        assert f"loaded {version}" in result.out, result.tail()


SHORT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("whatever it says"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                 "allocate memory: you tried to allocate 1000 bytes. Error code 12 (Cannot ...)"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904, 4]"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a memory object"),
    RuntimeError("could not create a primitive"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                 "Failed to CUDA calloc 536870912 bytes"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    RuntimeError("unable to mmap 538090408 bytes from file <m.safetensors>: Cannot allocate memory "
                 "(12)"),
    "error: 532 positions do not fit: out of memory (std::bad_alloc)",
]  # fmt: skip
OTHER_ERRORS = [
    RuntimeError("setStorage: sizes [3], strides [1], storage offset 0, and itemsize 4 requiring a "
                 "storage size of 12 are out of bounds for storage of size 8"),
    RuntimeError("CUDA error: an illegal memory access was encountered, in CUDACachingAllocator"),
    RuntimeError("PYTORCH_ALLOC_CONF: unrecognized option"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive"),
    RuntimeError("could not get an engine from a memory object"),
    "error: rank 1 ended, and did not come to what rank 0 waited for at job.py:1 (allocate)",
]  # fmt: skip


@pytest.mark.parametrize("error", [*SHORT_OF_MEMORY, *OTHER_ERRORS], ids=lambda e: repr(e)[-50:])
def test_is_for_memory(error):
    """Exact types and the allocators' own sentences; not a bug whose message speaks of storage."""
    assert measure.is_for_memory(error) == (error in SHORT_OF_MEMORY)


def test_what_a_real_allocator_says():
    """Of a size that no machine has, and of one beyond 64 bits; and the bug that looks alike."""
    for size, short in ((2**58, True), (2**62, True), ((2**62, 4), True), (None, False)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            torch.empty(size) if size else torch.empty(2).as_strided((3,), (1,))
        assert measure.is_for_memory(caught.value) == short, caught.value


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2; hblks counts the mappings that malloc has made."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"defghi")
    ]


def mapped_blocks(size):
    """How many mappings of its own malloc makes for a block of `size` bytes: 0 or 1."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.mallinfo2.restype = MallocInfo
    before = libc.mallinfo2().hblks
    block = libc.malloc(ctypes.c_size_t(size))
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")
def test_settings_are_put_back():
    """What is set for a measurement does not outlive it, also when that ends in an exception."""
    threads = torch.get_num_threads()
    for setting in (
        measure.kept_memory(),
        measure.num_threads(threads + 1),
        measure.limited_memory(CPU, 2**28),
    ):
        with pytest.raises(KeyError), setting:
            raise KeyError
        assert torch.get_num_threads() == threads
        assert mapped_blocks(40 * 2**20) == 1  # not so under `kept_memory`
        assert mapped_blocks(100 * 1024) == 0  # not so under `limited_memory`


@pytest.mark.parametrize(("repeats", "limit", "turns"), [(None, 60, 7), (None, 0, 1), (3, 0, 3)])
def test_timed_turns(repeats, limit, turns, monkeypatch):
    """As many as are asked for; if none are, as many as there is time for."""
    alone = SimpleNamespace(
        barrier=lambda: None, all_reduce=lambda *_, **__: None, ReduceOp=torch.distributed.ReduceOp
    )
    monkeypatch.setattr(measure, "dist", alone)
    monkeypatch.setattr(measure, "LIMIT_S", limit)
    run = SimpleNamespace(device=CPU, synchronize=lambda: None)
    seconds = measure.interleave(run, {"one": lambda: iter(["step"])}, repeats)
    assert len(seconds["one"]["step"]) == turns


def sources():
    """Every Python file of the repository: its path, and what it parses to."""
    files = [
        f for name in ("tasks", "figures", "tests") for f in (launch.ROOT / name).rglob("*.py")
    ]
    return {file: ast.parse(file.read_text()) for file in files}


def test_requirements():
    """Whatever is imported is declared, though another package may bring it."""
    lines = (launch.ROOT / "requirements.txt").read_text().splitlines()
    declared = {re.split("[=<>~]", line)[0] for line in lines if not line.startswith("#")}
    files, imported = sources(), set()
    for node in itertools.chain.from_iterable(map(ast.walk, files.values())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    imported -= sys.stdlib_module_names | {file.stem for file in files}
    imported -= {file.parent.name for file in files if file.stem == "__init__"}
    # smollm2.py fetches the one where it is needed; a benchmark takes the other if it is there.
    imported -= {"gguf", "deepspeed"}
    assert {"torch", "psutil"} <= imported <= declared, imported - declared


def test_no_private_functions():
    """Of PyTorch and the rest. (Its kernels' `aten` names are another matter: README, Limits.)"""
    documented = {"torch.utils._python_dispatch"}  # it has no other place
    found = []
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and re.search(r"\._|^_(?!_)", node.module):
                found += [(file.name, node.module)] * (node.module not in documented)
            of = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(of, ast.Name) and of.id in {"torch", "dist", "F", "transformers", "peft"}:
                found += [(file.name, node.attr)] * bool(re.match("_(?!_)", node.attr))
    assert not found


def test_docstrings_speak_for_themselves():
    """They have no codes of lists that a reader does not have, such as a letter and a number."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for file, tree in sources().items():
        for node in ast.walk(tree):
            said = (ast.get_docstring(node) if isinstance(node, kinds) else None) or ""
            said = re.sub(r"rank \d  .*", "", said)  # a timeline, of F0 and B0
            assert not re.search(r"\b[A-F]\d{1,2}\b", said), (file.name, said)


# ---------------------------------------------------------------- what people see


def test_styled(monkeypatch):
    """Colours in a terminal alone, and not where NO_COLOR is set or the terminal knows none."""
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert styled("ok", "green") == "ok"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert styled("ok", "green") == "\033[32mok\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("ok", "green") == "ok"
    monkeypatch.setenv("NO_COLOR", "")  # which is as if it were not set
    assert styled("FAILED", "red") == "\033[31mFAILED\033[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert styled("ok", "green") == "ok"


def test_a_long_name_of_a_check():
    """It is a line of a hundred characters, too; how it begins and ends is seen."""
    name = "logits: base_model.model.model.layers.*.self_attn.q_proj.lora_A.default.weight grad"
    assert shortened("loss") == "loss"
    short = shortened(name)
    assert len(short) == NAME_WIDTH and short.startswith("logits: base_model")
    assert short.endswith(".self_attn.q_proj.lora_A.default.weight grad")


def test_verbose(tmp_path):
    """Below each check all that it measured; without --verbose nothing, and the same otherwise."""
    path = launch.TASKS / "tp_mlp.py"
    args = ["--hidden-size", 8, "--intermediate-size", 12, "--device", "cpu"]
    short = launch.ranks(path, *args, nproc=2, folder=tmp_path)
    full = launch.ranks(path, *args, "--verbose", nproc=2, folder=tmp_path)
    assert short.code == full.code == 0, full.tail()
    lines = full.out.splitlines()
    details = [after for line, after in itertools.pairwise(lines) if line.startswith("check ")]
    assert details and all(re.match(r"    rank \d is nearest; mean\|diff\| ", d) for d in details)
    assert any("reference's own" in d and "rms 0." in d for d in details), details
    left = [line for line in lines if not line.startswith("    rank ")]
    assert left == short.out.splitlines()


def test_what_a_mask_is_made_of():
    """Padding or documents; with both, one of them would be forgotten."""
    real, documents = torch.ones(2, 5, dtype=torch.bool), torch.arange(10).view(2, 5)
    for fields in {"real": real}, {"documents": documents}:
        again = MaskInfo.from_tensor(MaskInfo(5, **fields).to_tensor())
        assert all(torch.equal(getattr(again, name), value) for name, value in fields.items())
    with pytest.raises(ValueError, match="padding or documents, not both"):
        MaskInfo(5, real, documents)


@pytest.mark.parametrize(("set_to", "more"), [("SIG_DFL", ["SIGHUP"]), ("SIG_IGN", [])])
def test_a_closed_terminal(set_to, more):
    """It stops a job, but for one that nohup has started."""
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{set_to}); "
    code += "from harness.environment import STOPPING; print(*(one.name for one in STOPPING))"
    result = launch.run([sys.executable, "-c", code], env={"PYTHONPATH": str(launch.TASKS)})
    assert result.code == 0 and result.out.split() == ["SIGINT", "SIGTERM", *more], result.tail()
