"""What a program of one's own asks of a split model: norm and clipping, state dict, a folder."""

import os
import re
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

import launch
from conftest import make_llama
from pages import CODE
from planting import plant, replace
from utils.full_model import save_pretrained


def full_model(folder, model, nproc, *args, tasks=launch.TASKS, **settings):
    """The Result of tests/helpers/full_model.py. settings: of `launch.ranks`."""
    (folder / "models").mkdir()
    path = launch.HELPERS / "full_model.py"
    return launch.ranks(
        path, tasks, model, folder / "models", *args, nproc=nproc, folder=folder / "models",
        **settings,
    )  # fmt: skip


STRESS = pytest.mark.stress


@pytest.mark.parametrize(
    ("nproc", "dtype"),
    [(4, "float64"), *(pytest.param(*of, marks=STRESS) for of in (
        (2, "float64"), (2, "float32"), (3, "float32"), (4, "float32")))],
)  # fmt: skip
def test_all_techniques(nproc, dtype, odd_llama, tmp_path):
    result = full_model(tmp_path, odd_llama, nproc, dtype, "full")
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


@STRESS
@pytest.mark.parametrize("nproc", [2, 4])
def test_tied(nproc, tmp_path):
    """One file has a tied weight once, and what was trained of it is one gradient."""
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    model = make_llama(tmp_path / "tied", **changes)
    names = [] if nproc == 4 else ["TP", "DTensor", "FSDP2"]
    result = full_model(tmp_path, model, nproc, "float64", "full", *names)
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2), (2, 1)])
def test_killed_between_two_renames(before, after, tmp_path, monkeypatch):
    """Of an earlier model in one or two files, and a later one, there is no mixture to load."""
    model, rename = LlamaForCausalLM.from_pretrained(launch.TASKS / "tiny_llama"), os.replace
    sizes = {1: "1GB", 2: 2 * sum(p.nbytes for p in model.parameters()) // 3}
    save_pretrained(model, tmp_path, sizes[before])
    assert len([*tmp_path.glob("*.safetensors")]) == before
    LlamaForCausalLM.from_pretrained(tmp_path)
    renamed = []

    def once(*paths):
        renamed.append(paths)
        if len(renamed) == after:  # before the last of one file, or the second of two
            raise KeyboardInterrupt
        rename(*paths)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(model, tmp_path, sizes[after])
    with pytest.raises(OSError, match="no file named"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "what",
    [
        "wrong_use",
        "lost",
        "optimizers",
        "shared_batches",
        "of_tokens",
        "of_slices",
        "adapters",
        "loading",
        "saving",
        "right_use",
        "of_dtensors",
        "parts_of_losses",
        "freed",
        "edges",
        pytest.param("on_two_axes", marks=STRESS),
    ],
)
def test_wrong_use(what, odd_llama, tmp_path):
    """What would be silently wrong is refused. Folders: what is read, and in how much memory."""
    nproc = 4 if what == "on_two_axes" else 2
    result = full_model(tmp_path, odd_llama, nproc, "float64", what)
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


@pytest.mark.parametrize(
    ("what", "nproc", "dtype"),
    [("autocast", 2, "float32"), ("accumulated", 2, "float64"),
     *(pytest.param(*of, marks=STRESS) for of in (
        ("recompute", 2, "float32"), ("recompute", 4, "float64"), ("autocast", 4, "float32"),
        ("resume", 2, "float64"), ("resume", 4, "float64"), ("resume", 2, "float32"),
        ("accumulated", 4, "float64"), ("accumulated", 3, "float32")))],
)  # fmt: skip
def test_while_it_trains(what, nproc, dtype, odd_llama, tmp_path):
    """Layers recomputed, microbatches, bfloat16 over float32 weights, checkpoints of any split."""
    result = full_model(tmp_path, odd_llama, nproc, dtype, what)
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


def test_resume(odd_llama, tmp_path):
    """Checkpoints of some techniques; of all in `make stress`."""
    names = "TP", "Ulysses", "FSDP2"
    result = full_model(tmp_path, odd_llama, 2, "float64", "resume", *names)
    assert result.code == 0 and result.out.count("full model: ok") == 2, result.tail()


@STRESS
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler, which torch.compile wants")
@pytest.mark.parametrize(
    ("nproc", "dtype"), [(1, "float32"), (2, "float64"), (3, "float32"), (4, "float64")]
)
def test_compiled(dtype, nproc, odd_llama, tmp_path):
    result = full_model(tmp_path, odd_llama, nproc, dtype, "compiled", timeout=900)
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


@pytest.mark.parametrize(
    ("nproc", "dtype"),
    [(3, "float64"), *(pytest.param(*of, marks=STRESS) for of in (
        (1, "float32"), (2, "float32"), (4, "float32"), (4, "float64")))],
)  # fmt: skip
def test_loss_in_tiles(nproc, dtype, odd_llama, tmp_path):
    result = full_model(tmp_path, odd_llama, nproc, dtype, "in_tiles")
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


@pytest.mark.parametrize(
    ("nproc", "dtype"),
    [(3, "float64"), *(pytest.param(*of, marks=STRESS) for of in (
        (1, "float64"), (2, "float64"), (4, "float64"), (2, "float32"), (4, "float32")))],
)  # fmt: skip
def test_functions(nproc, dtype, odd_llama, tmp_path):
    """Attention and cross-entropy as functions of tensors and a group, without a model."""
    result = full_model(tmp_path, odd_llama, nproc, dtype, "functions")
    assert result.code == 0 and result.out.count("full model: ok") == nproc, result.tail()


def train_alone(model):
    """What the page's program does, by one process and plain transformers. The norms."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(model.config.vocab_size, (8, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("nproc", [4, pytest.param(2, marks=STRESS)])
def test_program_of_the_page(nproc, tmp_path):
    """`figures/tasks.md`'s training, as it stands, writes the model that one process trains."""
    (shown,) = [code for code in CODE if "save_pretrained" in code]
    assert len(shown.splitlines()) < 60
    tiny, folder = launch.TASKS / "tiny_llama", tmp_path / "trained"
    code = shown.replace('"parallel-llama/tasks"', repr(str(launch.TASKS)))
    code = code.replace('"trained"', repr(str(folder)))
    code = code.replace('"unsloth/Llama-3.2-1B"', repr(str(tiny)))
    (tmp_path / "train.py").write_text(code)
    result = launch.ranks(tmp_path / "train.py", nproc=nproc, folder=tmp_path)
    assert result.code == 0, result.tail()
    whole = LlamaForCausalLM.from_pretrained(tiny).float().train()
    expected = train_alone(whole)
    norms = [float(norm) for norm in re.findall(r"gradient norm (.*)", result.out)]
    assert norms == pytest.approx(expected, rel=1e-5) and min(norms) > 1
    trained = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = LlamaForCausalLM.from_pretrained(tiny).float()
    for name, parameter in whole.named_parameters():
        # Adam divides by the gradient's size: where that is next to nothing, rounding decides.
        off = (trained.get_parameter(name) - parameter).norm()
        assert off < 1e-2 * (parameter - before.get_parameter(name)).norm(), name


BUGS = {
    # name: (technique, ranks, file, right, wrong, what the program says)
    "all that ranks have counts": (
        "full TP", 2, "full_model.py", 'return f"{name} {[', 'return f"{dist.get_rank()} {name} {[',
        "norm",
    ),
    "a slice stands for the whole": (
        "full TP", 2, "full_model.py", 'return f"{name} {[(part.start, part.stop) for',
        'return f"{name} {[0 * (part.start, part.stop) for', "differ between ranks|norm",
    ),
    "the last tile's gradient alone": (
        "in_tiles TP", 2, "tiled_vocabulary.py", "dweight += grads.pop()",
        "dweight.copy_(grads.pop())",
        "embed_tokens.weight, 1 bytes|lm_head.weight, 1 bytes",
    ),
    "tiles whose loss is a mean": (
        "in_tiles TP", 2, "tiled_vocabulary.py", '*of_tile, "sum", rows)',
        '*of_tile, "mean", rows)',
        "loss in tiles of 1 bytes",
    ),
    "a rank's own norm": (
        "full TP", 2, "full_model.py", "for one, count in zip(everyone, counts",
        "for one, count in zip([table] * 2, [len(table)] * 2", "AssertionError: .'TP'|norm",
    ),
    "gradients that are not summed pass": (
        "full Ulysses", 2, "full_model.py", "if abs(norm - expected) > 1e-2",
        "if abs(norm) < -1e-2",
        "not refused: sum or average",
    ),
    "small gradients are scaled up": (
        "full TP", 2, "full_model.py", "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "(max_norm / (norm + 1e-6))", "clipped",
    ),
    "a shared KV head has one rank's gradient": (
        "full TP", 4, "shards.py", "copy_to_region(self.weight, group)", "self.weight",
        "differ between ranks that all have it",
    ),
    "a piece changes on its way": (
        "full DTensor", 2, "full_model.py", "= piece.cpu()", "= piece.cpu() * (1 + 1e-6 * holder)",
        "in the full state",
    ),
    "an earlier index stays": (
        "full TP", 2, "full_model.py", "(folder / INDEX).unlink(missing_ok=True)", "pass",
        "AssertionError",
    ),
    "earlier files stay": (
        "full TP", 2, "full_model.py", "earlier.unlink()", "pass", "AssertionError",
    ),
    "the folder says how it was split": (
        "full Ulysses", 2, "full_model.py",
        "config, generation = settings_of(model)",
        "config, generation = model.config, model.generation_config", "config.json",
    ),
    "slices pass for a state": (
        "wrong_use", 2, "shards.py",
        'if any(getattr(module, "slices", ()) for module in model.modules()):', "if False:",
        "not refused: full_state_dict",
    ),
    "an optimizer of matrices takes slices": (
        "optimizers", 2, "training.py",
        "if any(map(OF_MATRICES.search, kinds)) and", "if False and",
        "not refused: Muon",
    ),
    "an optimizer from before the split trains nothing": (
        "optimizers", 2, "training.py", "if any(id(p) not in present", "if any(id(p) in ()",
        "not refused: from before the split",
    ),
    "unlike batches are not seen": (
        "shared_batches", 2, "agreement.py", "if differ(batches):", "if False:",
        "not refused: have different batches",
    ),
    "an evaluation hides the training's batches": (
        "shared_batches", 2, "agreement.py", "and model.training in record.modes:", "and True:",
        "not refused: have different batches",
    ),
    "parts that are called alone compare nothing": (
        "shared_batches", 2, "agreement.py", "for part in model, model.model:",
        "for part in [model]:", "not refused: have different batches",
    ),
    "a model's own forward compares nothing": (
        "shared_batches", 2, "sequence.py", "check_forward(self, given |", "dict(given |",
        "not refused: have different batches",
    ),
    "DDP over ranks that share batches": (
        "shared_batches", 2, "training.py", "if len(both) > 1:", "if False:",
        "not refused: which share each batch",
    ),
    "DDP takes a part of a split model": (
        "shared_batches", 2, "agreement.py",
        "model.model.batch_groups, model.model.row_at_split = model.batch_groups, "
        "model.row_at_split", "model.model.row_at_split = model.row_at_split",
        "not refused: which share each batch",
    ),
    "other seeds are not seen": (
        "shared_batches", 2, "agreement.py", "if differ(starts):", "if False:",
        "not refused: had different weights",
    ),
    "rows that were filled by chance are not seen": (
        "shared_batches", 2, "agreement.py", "[flat[:ENDS], flat[-ENDS:]]", "[flat[:ENDS]]",
        "not refused: have different values",
    ),
    "adapters of other seeds are not seen": (
        "adapters", 2, "agreement.py", "if unlike and not unsummed:", "if False:",
        "not refused: have different values",
    ),
    "a prompt is no part of the model": (
        "adapters", 2, "agreement.py", "(prompted or model)", "model", "not refused: ",
    ),
    "an adapter drops the same on each rank": (
        "adapters", 2, "refusals.py", "if module.training and rate and id(module) not in unused:",
        "if False:",
        "not refused: would drop the same",
    ),
    "gradients that are not summed are not seen": (
        "shared_batches", 2, "agreement.py", "if unlike.any():", "if False:",
        "call sum_gradients",
    ),
    "each rank clips by its own tokens": (
        "shared_batches", 2, "training.py",
        'patch_with_check(nn.utils, "clip_grads_with_norm_", note_clipping, "parameters")', "pass",
        "not refused: call sum_gradients",
    ),
    "slices of different weights are added up": (
        "of_slices", 2, "agreement.py", "if both := ranks_that_split(tensors, group):", "if False:",
        "'which split the weights'|not refused: which split the weights",
    ),
    "a rank steps for other ranks' slices": (
        "of_slices", 2, "training.py",
        "if both := ranks_that_split(parameters, optimizer.process_group):", "if False:",
        "not refused: ZeroRedundancyOptimizer",
    ),
    "ranks sample by unlike chance": (
        "of_slices", 2, "agreement.py", "if not said or", "if True or",
        "'have different random states'",
    ),
    "sizes are the configuration's": (
        "of_slices", 2, "refusals.py", "if last in sizes and", "if False and",
        "not refused: has 60 rows",
    ),
    "one weight becomes two": (
        "of_slices", 2, "refusals.py", "if other != name and {other, name} != tied:", "if False:",
        "not refused: are one weight",
    ),
    "replicas of other seeds are not seen": (
        "of_slices", 2, "agreement.py", "if unlike is not None:", "if False:",
        "not refused: make replicas with one seed",
    ),
    "a copy is not known": (
        "of_slices", 2, "agreement.py", "return SHARING_BATCHES.setdefault(model, Record())",
        "return SHARING_BATCHES.get(model, Record())", "not refused: ",
    ),
    "a new gradient in an old tensor is an old one": (
        "right_use", 2, "replicas.py", "same = grad._version == version", "same = True",
        "these gradients are sums over these ranks already",
    ),
    "FSDP1's parts are weights": (
        "right_use", 2, "agreement.py", "parameters = {} if fsdp1 else with_prompt(model)",
        "parameters = with_prompt(model)", "Error",
    ),
    "a dropout that is not used is refused": (
        "adapters", 2, "refusals.py",
        "unused |= {id(one) for name, one in dropouts.items() if name not in active}", "pass",
        "would drop the same",
    ),
    "shards of another axis are not compared": (
        "on_two_axes", 4, "agreement.py", "len(ranks_in_mesh(p, ranks)) < 2",
        "len(ranks_in_mesh(p, ranks)) < 1", "not refused: before the step",
    ),
    "a rank reads the first slice": (
        "loading", 2, "models.py", "file.get_slice(key)[shard or tuple(map(slice, shape))]",
        "file.get_slice(key)[[slice(0, x.stop - x.start) for x in shard or map(slice, shape)]]",
        "as loaded",
    ),
    "a folder's dtype is not asked for": (
        "loading", 2, "models.py", 'said = getattr(config, "dtype", None) or',
        "said = torch.float32 or", "AssertionError",
    ),
    "all full tensors are there at once": (
        "saving", 2, "full_model.py", "tensors = full_tensors(model, found, group)\n    if",
        "tensors = iter([*full_tensors(model, found, group)])\n    if", "full tensors",
    ),
    "its own later keys are hidden where all are seen": (
        "functions", 2, "ring_attention.py", "attend(q, *kv, causal=causal and share == rank)",
        "attend(q, *kv, causal=share == rank)", "ring, all",
    ),
    "later keys have no gradient where all are seen": (
        "functions", 2, "ring_attention.py", "if not ctx.causal or share <= rank:",
        "if share <= rank:", "ring, all",
    ),
    "the ranks' sizes are not asked for": (
        "functions", 2, "tp_llama.py", "sum(sizes[:rank]), sum(sizes[: rank + 1])",
        "rank * sizes[rank], (rank + 1) * sizes[rank]", "cross-entropy, ",
    ),
    "slices that FSDP2 has split pass for tensors": (
        "lost", 2, "refusals.py", 'if not hasattr(getattr(module, name), "shard"):', "if False:",
        "'model.embed_tokens.weight was a slice, and has been replaced'",
    ),
    "clipping that was imported before clips slices": (
        "lost", 2, "training.py", "if value is original]", "if value is check]",
        "not refused: get_total_norm",
    ),
    "positions are counted by a rank's tokens": (
        "of_tokens", 2, "pretrain_2d.py",
        '"position_ids": positions}', '"position_ids": None}', "logits of",
    ),
    "eager attention with another mask": (
        "of_tokens", 2, "pretrain_2d.py", 'in ("eager", "flex_attention"):', 'in ("none",):',
        "not refused: eager attention",
    ),
    "a loss of one's own is not called": (
        "lost", 2, "refusals.py", "if model.loss_function != expected:", "if False:",
        "not refused: a loss_function",
    ),
    "hidden states pass for logits": (
        "in_tiles TP", 2, "tp_llama.py",
        'output = type(output)(**(dict(output) | {"logits": None}))', "output.logits = None",
        "AssertionError: TP",
    ),
    "an optimizer of some parameters is filled in": (
        "wrong_use", 2, "sharded_checkpoint.py",
        'if names_by_group(model, optimizer, group) != record["groups"]:', "if False:",
        "not refused: had other groups",
    ),
    "PyTorch clips slices": (
        "wrong_use", 2, "shards.py", "SLICES[id(parameter)] = parameter", "pass",
        "not refused: get_total_norm",
    ),
    "a scaler skips steps by slices": (
        "wrong_use", 2, "training.py", 'if given["self"].is_enabled() and', "if False and",
        "not refused: GradScaler",
    ),
    "a part's state dict is slices": (
        "wrong_use", 2, "shards.py", "for module in model.modules():", "for module in [model]:",
        "not refused: full_state_dict",
    ),
    "half a model is saved": (
        "wrong_use", 2, "full_model.py", "!= prod(one.shape):", "> prod(one.shape):",
        "not refused: these ranks",
    ),
    "a full disk is rank 0's alone": (
        "wrong_use", 2, "full_model.py", "if said[0]:", "if error:", "not refused: ",
    ),
    "autocast's attention takes float32": (
        "autocast Ulysses", 2, "sequence.py", "if torch.is_autocast_enabled(device_type) and",
        "if False and", "",
    ),
    "attention is run again": (
        "recompute Ulysses", 2, "kernels.py",
        "aten._scaled_dot_product_flash_attention_for_cpu.default,", "", "Ulysses: attention {",
    ),
    "Adam begins anew": (
        "resume TP", 2, "sharded_checkpoint.py", "torch.tensor(x, dtype=wide, device=device) for",
        "torch.tensor(0 * x, dtype=wide, device=device) for", "resumed",
    ),
    "a moment is forgotten": (
        "resume DTensor", 2, "sharded_checkpoint.py", "local_part(tensor.detach()).copy_(values)",
        'local_part(tensor.detach()).copy_(values * (key != "exp_avg"))', "resumed",
    ),
    "the learning rate is not restored": (
        "resume Ulysses", 2, "sharded_checkpoint.py", "for key, value in settings.items():",
        "for key, value in ():", "AssertionError: Ulysses",
    ),
    "another model's state is taken": (
        "wrong_use", 2, "sharded_checkpoint.py", 'if "states" not in record or saved != shapes:',
        "if False:", "'of another model', UserError",
    ),
    "other tokens than the length says pass": (
        "functions", 2, "sequence.py", "if stop - first != tokens:", "if False:",
        "not refused: tokens on rank",
    ),
    "ranks have other heads than they attend with": (
        "functions", 2, "ulysses_forward.py",
        "shard_heads(query.shape[1], key.shape[1], P, rank)[:2]",
        "shard_heads(query.shape[1], key.shape[1], P, P - 1 - rank)[:2]", "Ulysses",
    ),
    "ignored labels have a loss": (
        "functions", 2, "tp_llama.py", "losses.masked_fill(~is_label, 0)", "losses",
        "cross-entropy",
    ),
    "FSDP2's root is not there after an evaluation": (
        "full FSDP2", 2, "full_model.py", "module.reshard()", "pass", "FSDP2: norm",
    ),
    "the optimizer's state is not there after an evaluation": (
        "resume FSDP2", 2, "full_model.py", "module.reshard()", "pass", "before the split",
    ),
    "a NaN on one rank is not seen": (
        "wrong_use", 2, "full_model.py", "if not math.isfinite(norm):", "if False:",
        "assert math.isnan",
    ),
    "a stage's configuration is written": (
        "wrong_use", 2, "pipeline_llama.py",
        "model.original_settings = model.config, model.generation_config", "pass",
        "a stage's folder",
    ),
    "heads drop alike": (
        "wrong_use", 2, "refusals.py", "if rate:", "if False:",
        "not refused: drop the same",
    ),
}  # fmt: skip


def with_marks():
    """All in `make stress`; in `make test-all` one of each kind."""
    quick = "all that ranks have counts", "a piece changes on its way", "slices pass for a state"
    for name in BUGS:
        yield pytest.param(name, marks=[STRESS] * (name not in quick))


def test_every_bug_has_its_place():
    """Also of those that are planted in `make stress` alone."""
    for _, _, file, right, wrong, _ in BUGS.values():
        (path,) = launch.TASKS.rglob(file)
        assert replace(path.read_text(), right, wrong) != path.read_text()


@pytest.mark.parametrize("name", list(with_marks()))
def test_planted_bug(name, odd_llama, tmp_path):
    technique, nproc, file, right, wrong, said = BUGS[name]
    plant(tmp_path / "tasks", file, right, wrong)
    args = odd_llama, nproc, "float64", *technique.split(" ", 1)
    result = full_model(tmp_path, *args, tasks=tmp_path / "tasks")
    assert result.code != 0 and re.search(said, result.err), result.tail()
