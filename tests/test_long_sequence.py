"""Task 5's techniques for long sequences: what they run, what they hold, and when they do not fit.

That they change no gradient is checked by the script itself, here on 1 to 4 ranks.
"""

import contextlib
import copy
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import launch
from figures.plan import longest
from harness.finetune import ALONE
from harness.float64 import compute_in_float64
from harness.memory_profile import record_memory
from memory import long_sequence, saved_outputs
from memory.head_groups import plan_rounds
from memory.long_sequence import Techniques, sequence_loss, supported_techniques
from utils.kernels import cpu_kernel_supports_gqa

SCRIPT = launch.TASKS / "ulysses_finetune.py"


BOTH = [
    pytest.param(peft, nproc, marks=[pytest.mark.stress] * (peft == other))
    for nproc, other in ((1, "lora"), (2, "lora"), (3, "prompt"), (4, "lora"))
    for peft in ("lora", "prompt")
]


@pytest.mark.parametrize(("peft", "nproc"), BOTH)
def test_float64(peft, nproc, tmp_path, odd_llama):
    """Each technique alone and all together, a batch of 2, a prime length, odd numbers of heads."""
    args = ["--model", odd_llama, "--dtype", "float64", "--peft", peft, "--batch-size", 2]
    args += ["--seq-len", 43, "--num-virtual-tokens", 4, "--steps", 1, "--check-steps", 1]
    result = launch.ranks(SCRIPT, *args, nproc=nproc, folder=tmp_path)
    assert result.code == 0, result.tail()
    for name in ALONE:
        for what in ("loss", "gradients"):
            assert (f"check {name}: {what}" in result.out) == ("host memory" not in name), name


@pytest.fixture(scope="module")
def alone():
    """A mesh of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def small_llama(**settings):
    torch.manual_seed(0)
    settings = dict(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=5,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings)).train()


def run_step(model, techniques, mesh, length=29):
    torch.manual_seed(1)
    embeddings = torch.randn(1, length, model.config.hidden_size, dtype=model.dtype)
    embeddings.requires_grad_()
    targets = torch.randint(-1, 61, (1, length))
    targets[targets == -1] = -100
    loss = sequence_loss(model, lambda: embeddings * 1, targets, length, mesh, techniques)
    loss.backward()
    return loss, embeddings.grad


@pytest.mark.parametrize(
    ("backward", "groups", "times"),
    [("saved-outputs", True, 1), ("selective", True, 1),
     pytest.param("selective", False, 1, marks=pytest.mark.stress),
     pytest.param("checkpoint", False, 2, marks=pytest.mark.stress),
     pytest.param("plain", False, 1, marks=pytest.mark.stress)],
)  # fmt: skip
def test_attention_is_run_once(backward, groups, times, alone):
    """The forward kernel runs once for each layer and group of heads, its backward too."""
    model = small_llama()
    cpu_kernel_supports_gqa()  # which runs the kernel once, to see
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_step(model, Techniques(backward, head_groups=groups, tile_tokens=7), alone)
    # (A selective checkpoint takes calls and hands them on or not: those that ran made tensors.)
    made = [
        event.name for event in profiler.events()
        if any(child.name.startswith("aten::empty") for child in event.cpu_children)
    ]  # fmt: skip
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    rounds = 2 if groups else 1
    assert made.count(kernel) == 5 * rounds * times
    assert made.count(kernel + "_backward") == 5 * rounds


@pytest.mark.parametrize("name", [name for name in ALONE if "host memory" not in name])
def test_no_gradient_is_written_over(name, alone):
    """What autograd hands to a function may have other users: a hook that keeps it, here."""
    model = small_llama()
    for parameter in model.model.layers[1:3].parameters():
        parameter.requires_grad_(False)
    embeddings, targets = torch.randn(1, 29, 24).requires_grad_(), torch.randint(61, (1, 29))
    techniques, kept = Techniques(*ALONE[name], tile_tokens=7), []
    loss = sequence_loss(model, lambda: embeddings * 1, targets, 29, alone, techniques)
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            node.register_prehook(lambda grads: kept.extend((g, g.clone()) for g in grads))
    loss.backward()
    assert kept and all(torch.equal(grad, before) for grad, before in kept)


def test_few_layers_are_built_twice(alone, monkeypatch):
    """What layers free takes hidden states: far fewer than the L (L - 1) / 2 without."""
    calls, plain = [], saved_outputs.finish_all
    monkeypatch.setattr(saved_outputs, "finish_all", lambda *a: calls.append(1) or plain(*a))
    for layers, most in ((1, 0), (2, 0), (5, 6), (16, 32)):
        calls.clear()
        model = small_llama()
        model.model.layers.extend(copy.deepcopy(model.model.layers[0]) for _ in range(layers - 5))
        del model.model.layers[layers:]
        run_step(model, Techniques(), alone)
        assert layers <= len(calls) <= layers + most, (layers, len(calls))


class NoStream:
    """In the place of a CUDA stream, which the CPU has not: it counts what is on the way."""

    device = "cpu"

    def __init__(self):
        self.events = []

    def record_event(self):
        self.events.append("open")
        return len(self.events) - 1

    def wait_event(self, event):
        self.events[event] = "waited for"

    def wait_stream(self, other):
        pass


def test_offload_keeps_little_on_the_device(alone, monkeypatch):
    """Outputs and hidden states are away, but for the last two on their way and one ahead."""
    model, techniques = small_llama(), Techniques(tile_tokens=7)
    loss, grad = run_step(model, techniques, alone)
    stream, away, most = NoStream(), [], []
    to_host, empty_like = saved_outputs.Saved.away, torch.empty_like

    def pinned(tensor, pin_memory=False, **kwargs):
        host = empty_like(tensor, **kwargs)
        away.extend([id(host)] * pin_memory)
        return host

    def counted(saved, tensors):
        saved.stream = stream
        host = to_host(saved, tensors)
        assert all(id(tensor) in away for tensor in host)
        most.append(len(saved.leaving) + len(saved.coming))
        assert stream.events.count("open") <= len(saved.leaving) + len(saved.coming)
        return host

    monkeypatch.setattr(saved_outputs.Saved, "away", counted)
    monkeypatch.setattr(torch, "empty_like", pinned)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    again, same = run_step(model, techniques, alone)
    assert torch.equal(loss, again) and torch.equal(grad, same)
    assert len(most) > 5 and max(most) <= 3


def test_heads_in_a_round(odd_llama):
    """Every query head once, with its KV head; no more than a group's on all ranks together."""
    for N, K in ((8, 2), (6, 3), (12, 3), (5, 5), (8, 1)):
        config = SimpleNamespace(num_attention_heads=N, num_key_value_heads=K)
        for ranks in range(1, N + 1):
            rounds = plan_rounds(config, ranks, True)
            heads = [(q, k) for turn in rounds for q, k in turn if q[1] > q[0]]
            seen = sorted(head for q, _ in heads for head in range(*q))
            assert seen == list(range(N))
            assert all(head // (N // K) == k[0] and k[1] == k[0] + 1
                       for q, k in heads for head in range(*q))  # fmt: skip
            for turn in rounds:
                assert sum(q[1] - q[0] for q, _ in turn) <= max(N // K, ranks)


def lora(model, **settings):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], **settings))


OBSTACLES = {
    "attention has dropout": lambda: small_llama(attention_dropout=0.1),
    "a layer has dropout": lambda: lora(small_llama(), lora_dropout=0.1).get_base_model(),
    "model.layers.0.mlp.down_proj drops parts of an adapter's weights": lambda: get_peft_model(
        small_llama(), LoHaConfig(target_modules=["down_proj"], module_dropout=0.5)
    ).get_base_model(),
    "a projection is neither linear nor LoRA": lambda: lora(
        small_llama(), use_dora=True
    ).get_base_model(),
}


@pytest.mark.parametrize("why", OBSTACLES)
def test_what_the_fast_path_does_not_carry(why, alone):
    """It falls back to whole layers, recomputed, and says why; and is right."""
    model = OBSTACLES[why]()
    techniques, said = supported_techniques(model, Techniques())
    assert said == why and techniques.backward == "checkpoint" and not techniques.head_groups
    torch.manual_seed(2)
    loss, grad = run_step(model, techniques, alone)
    assert loss.isfinite() and grad.abs().sum() > 0
    with pytest.raises(ValueError, match=why):
        run_step(model, Techniques(), alone)


def test_adapter_of_the_head(alone):
    """The loss is taken whole then; another attention is refused."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(small_llama(), config).get_base_model().double()
    techniques, why = supported_techniques(model, Techniques())
    assert not techniques.tiled_loss and techniques.backward == "saved-outputs" and "adapter" in why
    attention = model.model.layers[2].self_attn
    attention.__class__ = type("Other", (type(attention),), {})
    with pytest.raises(ValueError, match="Other cannot be taken apart"):
        supported_techniques(model, Techniques())


def test_biases_are_carried(alone):
    model = small_llama(attention_bias=True, mlp_bias=True).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    compute_in_float64(model)
    assert supported_techniques(model, Techniques())[1] is None
    fast = run_step(model, Techniques(tile_bytes=4096), alone)
    weights = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = run_step(model, Techniques("plain", False, False, False), alone)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(weights[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_under_autocast(alone, monkeypatch):
    """Attention in bfloat16, both ways; no farther from float32 than layers that keep all."""
    dtypes, model = [], small_llama()

    def spy(function, *qkv):
        dtypes.append(qkv[0].dtype)
        return function(*qkv)

    for name in "attend", "attend_backward":
        monkeypatch.setattr(long_sequence, name, partial(spy, getattr(long_sequence, name)))
    _, exact = run_step(model, Techniques("plain"), alone)
    errors = []
    for techniques in Techniques("plain"), Techniques(tile_tokens=5):
        with torch.autocast("cpu", torch.bfloat16):
            _, grad = run_step(model, techniques, alone)
        errors.append((grad - exact).norm())
    assert len(dtypes) == 2 * 2 * 5 and {*dtypes} == {torch.bfloat16}, dtypes
    assert 0 < errors[1] < 2 * errors[0], errors


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.stress), 2])
def test_out_of_memory(nproc, tmp_path):
    """One line, with what would help; nothing hangs."""
    args = ["--model", "random/small", "--num-layers", 2, "--steps", 1, "--check-steps", 0]
    args += ["--memory-budget", 0.02, "--seq-len", 3000]
    result = launch.ranks(SCRIPT, *args, nproc=nproc, folder=tmp_path)
    result.assert_refused("out of memory")


def test_memory_does_not_grow_with_the_logits(tmp_path):
    """300 tokens more take a small part of what their logits alone would."""
    peaks = []
    for length in (300, 600):
        path = tmp_path / f"{length}.json"
        args = ["--model", "random/small", "--steps", 1, "--check-steps", 0, "--json", path]
        args += ["--seq-len", length, "--memory-budget", 0.1]
        result = launch.ranks(SCRIPT, *args, nproc=1, folder=tmp_path)
        assert result.code == 0, result.tail()
        results = json.loads(path.read_text())["results"]
        peaks.append(results["peak_memory_bytes"][0] - results["idle_memory_bytes"][0])
    assert peaks[1] - peaks[0] < 300 * 32000 * 4 / 2, peaks


def test_what_is_held_most(alone):
    """Where hidden states are wide it is at the end of the loss: five of them, as is estimated."""
    H, S = 1024, 256
    sizes = dict(hidden_size=H, intermediate_size=64, vocab_size=61, head_dim=32)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).train().requires_grad_(False)
    prompt, targets = torch.zeros(1, 1, H, requires_grad=True), torch.randint(61, (1, S))
    techniques = Techniques(tile_tokens=32)

    def step():
        embeddings = partial(torch.mul, torch.ones(1, S, 1), prompt)
        sequence_loss(model, embeddings, targets, S, alone, techniques).backward()

    blocks = list(record_memory(step, torch.device("cpu"))[1].values())
    assert blocks.count(4 * H * S) == 5
    assert sum(blocks) == pytest.approx(S * max(
        longest.tensors(moment, 1) for moment in longest.ours(model.config, 1, 4, False).values()
    ), rel=0.02)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "left"),
    [
        (torch.bfloat16, 64, (8, 0), "saved-outputs"), (torch.bfloat16, 64, (7, 5), "checkpoint"),
        (torch.bfloat16, 264, (9, 0), "checkpoint"), (torch.float32, 264, (7, 5), "saved-outputs"),
        (torch.float32, 12, (9, 0), "checkpoint"), (torch.float64, 64, (9, 0), "checkpoint"),
    ],
)  # fmt: skip
def test_kernels_that_a_gpu_has(dtype, head_dim, capability, left, monkeypatch):
    """Where none gives log-sum-exps, layers are recomputed, and that is said."""
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, head_dim=head_dim)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, intermediate_size=8, **sizes)).to(dtype)
    assert supported_techniques(model, Techniques())[0].backward == "saved-outputs"  # on a CPU
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    techniques, why = supported_techniques(model, Techniques())
    assert techniques.backward == left and (why is None) == (left == "saved-outputs")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a CPU's bits are always alike")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_on_a_gpu(dtype, tmp_path):
    """With --deterministic a second run, which is resumed on its way, ends in the same adapter."""
    path, digests = tmp_path / "record.json", []
    out = ["--output-dir", tmp_path / "out"]
    for more in ([], [*out, "--steps", 3], [*out, "--resume"]):
        result = launch.torchrun(
            SCRIPT, "--device", "cuda", "--deterministic", "--dtype", dtype, "--steps", 6, *more,
            "--check-steps", 1, "--json", path, nproc=1, env=launch.ONE_GPU,
        )  # fmt: skip
        assert result.code == 0, result.tail()
        digests.append(json.loads(path.read_text())["results"]["sha256"])
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_gpu_kernels(dtype, offload, alone):
    """The log-sum-exp kernels of a GPU, and host memory, against whole layers under autograd."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no such kernel for bfloat16")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    config = LlamaConfig(vocab_size=61, intermediate_size=96, num_hidden_layers=5, **sizes)
    model = LlamaForCausalLM(config).to("cuda", dtype).train()
    steps = []
    for techniques in (Techniques(offload=offload), Techniques("plain", *[False] * 4)):
        torch.manual_seed(1)
        embeddings = torch.randn(2, 300, 64, device="cuda", dtype=dtype, requires_grad=True)
        targets = torch.randint(61, (2, 300), device="cuda")
        embed = partial(torch.mul, embeddings, 1)
        loss = sequence_loss(model, embed, targets, 300, alone, techniques)
        loss.backward()
        steps.append((loss, embeddings.grad))
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for ours, plain in zip(*steps, strict=True):
        assert (ours - plain).abs().max() <= tolerance * plain.abs().max()
