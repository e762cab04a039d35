"""What a user gets wrong ends in one `error:` line and exit code 2, quickly, with nothing lost."""

import json
import shutil
import socket

import pytest
import torch

import launch
from conftest import make_llama
from damage import DAMAGE, NORM, change_config, change_tensors, shard
from harness import flags
from loading.models import Source, download
from utils.errors import UserError, one_line


@pytest.fixture
def directory(odd_llama, tmp_path):
    """A copy of the odd Llama, to be damaged."""
    return shutil.copytree(odd_llama, tmp_path / "a model")


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_directory(name, directory):
    """Refused, by name, before any weight is read."""
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(UserError) as caught:
        Source(str(directory))
    assert message in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weight(value, directory):
    """Found when read, in a slice too, and named."""
    change_tensors(directory, lambda t: t["model.layers.1.mlp.up_proj.weight"][50, 3].fill_(value))
    source = Source(str(directory))
    source.read("model.layers.1.mlp.up_proj.weight", (slice(0, 50), slice(0, 42)))
    with pytest.raises(UserError, match=r"non-finite values in model.layers.1.mlp.up_proj"):
        source.load_model(torch.float32, torch.device("cpu"))


def test_sharded_directory_loads(directory):
    before = Source(str(directory)).read(NORM)
    shard(directory)
    assert torch.equal(Source(str(directory)).read(NORM), before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model", "no such directory"),
        ("./model", "no such directory"),
        ("gpt2", "no such directory"),
        ("x" * 300, "no such directory"),
        ("~nosuchuser/x", "no such directory"),
        ("random/huge", "no such preset; there are random/small, random/llama-3.2-1b"),
    ],
)
def test_no_such_model(name, message):
    with pytest.raises(UserError) as caught:
        Source(name)
    assert message in str(caught.value)


def test_tokenizer_knows_more_than_the_model(tmp_path):
    """Ids beyond the embedding would be read from elsewhere."""
    make_llama(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(launch.TASKS / "tiny_llama" / file, tmp_path)
    with pytest.raises(UserError, match="the model only 211"):
        Source(str(tmp_path)).tokenizer()


USAGE = {
    "no layers": (["--model", "random/small", "--num-layers", "0"], "1 to 8 layers"),
    "empty prompt": (["--prompt", ""], "--prompt is empty"),
    "no new tokens": (["--new-tokens", "0"], "must be a whole number above 0"),
    "prompt too long": (["--new-tokens", "3000"], "tiny takes 2048"),
    "two tokens": (["--seq-len", "2"], "--seq-len 2"),
    "JSON onto a folder": (["--json", "/tmp"], "--json /tmp"),
    "no such time": (["--timeout", str(2**40)], "must be a whole number above 0 (below 2**31)"),
    "no such size": (["--batch-size", str(2**31 - 1), "--seq-len", str(2**31 - 1)], "out of"),
    "no such memory": (["--batch-size", "99999", "--seq-len", str(2**31 - 1)], "out of memory: "),
}


USAGE_OF_THE_CACHE = {
    "empty prompt": (["--prompt", "One day", ""], "--prompt is empty"),
    "no prompt": (["--prompt"], "--prompt"),
    "no new tokens": (["--new-tokens", "0"], "must be a whole number above 0"),
    "too many": (["--new-tokens", "2045"], "tiny takes 2048"),
    "no length": (["--prompt-len", "0"], "--prompt-len"),
}


@pytest.mark.parametrize("name", [*USAGE, *(f"cache: {name}" for name in USAGE_OF_THE_CACHE)])
def test_usage(name, tmp_path):
    """One line, under plain python too."""
    cache = name.removeprefix("cache: ") if name.startswith("cache") else None
    args, message = USAGE_OF_THE_CACHE[cache] if cache else USAGE[name]
    file = launch.TASKS / ("kv_cache.py" if cache else "tp_llama.py")
    result = launch.ranks(file, *args, nproc=1, folder=tmp_path, torchrun=False)
    result.assert_refused(message)


def test_guess(monkeypatch):
    """What a mistyped flag may mean is said in the same line; an abbreviation is the flag."""
    said = []
    monkeypatch.setattr(flags, "fail", said.append)
    for args, guess in {
        ("--moddel", "x"): "; did you mean --model? ",
        ("--num_layers=3",): "; did you mean --num-layers? ",
        ("--zzz",): " --zzz (see",
        ("4300",): " 4300 (see",
        ("--num-layer", "3"): None,
    }.items():
        said.clear()
        found = flags.make_parser("").parse_args(args)
        assert guess in said[0] if guess else (said == [] and found.num_layers == 3), said


def test_message_that_is_only_a_key():
    """A KeyError's is told as one."""
    assert one_line(KeyError("metadata")) == "KeyError('metadata')"
    assert one_line(ValueError("too\n long")) == "too long" and one_line(OSError()) == "OSError()"


def test_no_pad_token(tmp_path):
    """Prompts of different lengths are padded without one: the mask hides what with."""
    directory = shutil.copytree(launch.TASKS / "tiny_llama", tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    change_config(directory, pad_token_id=None)
    args = ["--model", directory, "--repeats", 0]
    result = launch.ranks(launch.TASKS / "kv_cache.py", *args, nproc=2, folder=tmp_path)
    assert result.code == 0 and "jumps over the lazy dog" in result.out, result.tail()
    assert result.out.count("has no pad token: prompts are padded") == 1, result.tail()


def test_plan_names_no_module(tmp_path):
    """A plan that does not fit is refused; parallelize_module would go on without that entry."""
    launch.copy_tasks(tmp_path)
    file = tmp_path / "dtensor_llama.py"
    file.write_text(file.read_text().replace("mlp.up_proj", "mlp.up_projection"))
    result = launch.ranks(file, nproc=2, folder=tmp_path)
    result.assert_refused("up_projection, which")


@pytest.mark.alone
@pytest.mark.parametrize("what", ["model", pytest.param("flag", marks=pytest.mark.stress)])
def test_one_line_from_all_ranks(what, directory):
    """Under torchrun too: one line, from one rank, and the ranks exit with 2."""
    change_config(directory, model_type="gpt2")
    args = {"model": ["--model", directory], "flag": ["--seq-len", "x"]}[what]
    result = launch.torchrun("tp_llama", *args, nproc=2)
    assert result.code != 0 and not result.survivors and result.seconds < 60, result.tail()
    assert len(result.errors()) == 1 and "Traceback" not in result.out, result.tail()
    assert "exitcode  : 2" in result.err, result.tail()


def test_no_such_rank(tmp_path):
    env = {"RANK": "3", "WORLD_SIZE": "2"}
    result = launch.ranks(launch.TASKS / "tp_mlp.py", nproc=1, folder=tmp_path, env=env)
    result.assert_refused("no such rank", 10)


def test_closed_directory(monkeypatch):
    """What the system refuses is one line, too. (Tests may run as root, whom nothing stops.)"""
    from harness.job import Run

    def closed():
        raise PermissionError(13, "Permission denied", "/home/x/llama")

    monkeypatch.setattr(Run, "__init__", lambda self: None)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda all, mine: all.append(mine))
    run = Run()
    run.world_size = 0
    with pytest.raises(UserError, match="Permission denied: '/home/x/llama'"):
        run.together(closed)


def test_rope_by_length(directory, tmp_path):
    """A rank of Ulysses does not see the length that this one depends on."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    change_config(directory, rope_parameters=rope)
    file, args = launch.TASKS / "ulysses_forward.py", ["--model", directory]
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path)
    result.assert_refused("RoPE dynamic depends on the sequence's length")


@pytest.mark.parametrize("kind", ["gated", "no such revision", "a bad token"])
def test_what_the_hub_says(kind, monkeypatch):
    """What it was is told, and never a token."""
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError(f"401: {kind}, with hf_SecretOfMine")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    with pytest.raises(UserError) as caught:
        download("some/llama")
    assert kind in str(caught.value) and "Secret" not in str(caught.value)


@pytest.mark.alone
@pytest.mark.parametrize(
    "kind", ["off", *(pytest.param(k, marks=pytest.mark.stress) for k in ("refuses", "silent"))]
)
def test_unreachable_hub(kind, tmp_path):
    """One message, within seconds, that names a way out; what is in the cache is used."""
    args = ["--model", "some/llama", "--hidden-size", 8, "--intermediate-size", 8]
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if kind == "silent":
            hub.listen(100)
        env = {"HF_HUB_OFFLINE": "1" if kind == "off" else "0", "HF_HOME": str(tmp_path)}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}
        result = launch.torchrun("tp_mlp", *args, nproc=2, env=env)
        assert result.code != 0 and result.seconds < 60, result.tail()
        assert len(result.errors()) == 1 and "local directory" in result.errors()[0], result.tail()
        cache = tmp_path / "hub" / "models--some--llama"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        shutil.copytree(launch.TASKS / "tiny_llama", cache / "snapshots" / ("0" * 40))
        result = launch.torchrun("tp_mlp", *args, nproc=1, env=env)
        assert result.code == 0 and result.seconds < 60, result.tail()
        assert result.out.count(f"some/llama is cached in {cache}") == 1, result.tail()
