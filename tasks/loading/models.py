"""Where weights come from: a directory, the hub, or a seed; full, or only a rank's shards.

A full model out of a directory is what transformers itself loads. A rank's share is built on the
meta device (shapes, no memory), sharded there, and only then filled: each parameter reads its own
slice. So no rank holds more than one full tensor beside its shards. The configuration, the
tokenizer and the settings for generation are always read by transformers.
"""

import copy
import json
import math
import os
import re
import zlib
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from harness.float64 import compute_in_float64
from harness.measure import is_for_memory
from loading import smollm2
from loading.architectures import (
    LLAMAS,
    ONLY_LLAMA,
    fill_buffers,
    refuse_family,
    without_dropout,
)
from loading.presets import GPT2_PRESETS, PRESETS
from utils.errors import UserError, one_line
from utils.families import FAMILIES, GPT2, LLAMA, embedding_of
from utils.shards import mark_shard, shard_of

TINY = Path(__file__).resolve().parent.parent / "tiny_llama"
# Where transformers 4 and 5 differ: in 4 the dtype and the rotary settings have other names.
TRANSFORMERS_4 = transformers.__version__.startswith("4.")
HEAD = "lm_head.weight"
# What some files have beside a model's parameters, and no model reads: tables and masks.
NO_PARAMETERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
# A norm's weight: it is about 1.
NORM = re.compile(r"(norm|\bln_\w+)\.weight$")
# Settings of config.json that are the run's own affair: dtypes, and what a forward gives.
IGNORED_SETTINGS = (
    "dtype", "torch_dtype", "return_dict", "use_return_dict", "torchscript", "use_cache",
    "output_hidden_states", "output_attentions",
)  # fmt: skip
# A directory that has any of these files has a tokenizer.
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
             "special_tokens_map.json", "added_tokens.json")  # fmt: skip


# ---------------------------------------------------------------- sources of weights


def materialize(module, read, dtype, device):
    """Give a module on the meta device its values: each parameter becomes read(name, shard).

    Returns the module; in float64 its norms compute in float64 too (see `compute_in_float64`).
    """
    for name, meta in list(module.named_parameters()):
        values = read(name, shard_of(meta)).to(device, dtype)
        if isinstance(meta, DTensor):
            values = DTensor.from_local(
                values.contiguous(),
                meta.device_mesh,
                meta.placements,
                run_check=False,
                shape=meta.shape,
                stride=meta.stride(),
            )
        assert values.shape == meta.shape, (name, values.shape, meta.shape)
        real = nn.Parameter(values, requires_grad=meta.requires_grad)
        if hasattr(meta, "shard"):
            mark_shard(real, meta.shard, meta.ds_shape)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, real)
    if dtype == torch.float64:
        compute_in_float64(module)
    return module


class Source:
    """The configuration, weights and tokenizer that `--model` names.

    Checks everything that can be checked without reading weights; raises `UserError` with one line
    that says what is wrong. `config` is of the model's kind, such as a LlamaConfig; `family` is
    that kind's entry in `utils.families`. `directory` is None for random weights, `shapes` has
    every parameter's, by name. `generation` is the directory's GenerationConfig, None for random
    weights. `dropout` has the configuration's rates; they are 0 now, so that runs can be compared.

    model_types: the model types that are taken.
    """

    def __init__(self, name, num_layers=None, seed=0, model_types=ONLY_LLAMA):
        self.generation = None
        self.name, self.seed = name, seed
        self.files, self.directory = {}, None
        if name.startswith("random/"):
            preset = find_preset(name, model_types)
            layers = FAMILIES[preset["model_type"]].config_class(**preset).num_hidden_layers
            if num_layers is not None and not 1 <= num_layers <= layers:
                raise UserError(f"--num-layers {num_layers}: {name} has 1 to {layers} layers")
            settings = preset | {"num_hidden_layers": num_layers or layers}
        else:
            if num_layers is not None:
                raise UserError(f"--num-layers cuts random/ models short, not {name}")
            self.directory = find_directory(name)
            settings = read_settings(self.directory, model_types)
            self.generation = read_generation(self.directory)
        self.settings = settings  # the form in which they are written out again
        self.family = FAMILIES[settings["model_type"]]
        settings = {name: value for name, value in settings.items() if name not in IGNORED_SETTINGS}
        for key, value in settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name}: config.json: {key} {value}")
        try:
            self.config = self.family.config_class.from_dict(settings)
            self.dropout = without_dropout(self.config)
            parameters = self.empty_model().named_parameters()
            self.shapes = {name: tuple(p.shape) for name, p in parameters}
        except Exception as error:  # the library's own validation: say what it says, in one line
            raise UserError(f"{name}: config.json: {one_line(error)}") from None
        if self.config.num_hidden_layers < 1:
            raise UserError(f"{name}: config.json: a model without layers")
        if self.family is not GPT2:
            self.check_llama()
        elif self.config.add_cross_attention:
            raise UserError(f"{name}: config.json: add_cross_attention is not supported")
        if self.directory:
            tied = self.config.tie_word_embeddings
            self.files = rename(index_files(self.directory), self.shapes, tied, self.family)
            self.check_names()

    def check_llama(self):
        """Raise UserError for heads that do not fit each other, or are rotated in part."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        if heads % kv_heads:
            raise UserError(
                f"{self.name}: {heads} query heads do not divide by {kv_heads} KV heads"
            )
        rope = getattr(self.config, "rope_parameters", None) or {}
        partial = getattr(self.config, "partial_rotary_factor", rope.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise UserError(
                f"{self.name}: config.json: partial_rotary_factor {partial} is not supported, "
                "only 1"
            )

    def from_scratch(self, tokenizer):
        """Make weights random, by the seed; enlarge the vocabulary for the tokenizer if needed."""
        c = self.config
        c.vocab_size = max(c.vocab_size, len(tokenizer))
        c.bos_token_id, c.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        c.pad_token_id, self.directory, self.files = tokenizer.pad_token_id, None, {}
        self.generation = None
        self.shapes = {name: tuple(p.shape) for name, p in self.empty_model().named_parameters()}

    def empty_model(self):
        """Return an ordinary model, such as a LlamaForCausalLM, without memory (meta device)."""
        self.config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = self.family.model_class(self.config)
        if self.config.tie_word_embeddings:
            model.lm_head.weight = embedding_of(model).weight
        if self.generation:
            model.generation_config = copy.deepcopy(self.generation)
        return model.eval()

    def written_model(self, dtype):
        """Return a model without memory, whose `save_pretrained` writes the source's own settings.

        They are what transformers writes after its `from_pretrained`: also those for generation,
        and those that a run ignores, such as `use_cache`.
        """
        config = self.family.config_class.from_dict(self.settings)
        with torch.device("meta"):
            model = self.family.model_class(config).to(dtype)
        if self.generation:
            model.generation_config = copy.deepcopy(self.generation)
        return model

    def load_model(self, dtype, device, parallelize=None):
        """Load an ordinary model, such as a LlamaForCausalLM, or this rank's share of it.

        parallelize: a function that splits a model in place, by `keep_shard`, DTensors or stages.
        It is given the model without memory, so that only this rank's share is ever read. Without
        one, and with a directory, the model is what transformers' own `from_pretrained` loads.
        """
        if self.directory and not parallelize:
            return self.from_pretrained(dtype, device)
        model = self.empty_model()
        if parallelize:
            parallelize(model)
        fill_buffers(model, self.config, device)
        materialize(model, self.read, dtype, device)
        # (Not all stages of a pipeline have a head.)
        if self.config.tie_word_embeddings and model.lm_head:
            model.lm_head.weight = embedding_of(model).weight
        return model

    def from_pretrained(self, dtype, device):
        """Load the directory's model by transformers' own reading of all its files.

        The CPU holds it, once, before the device does.
        """
        from transformers import AutoModelForCausalLM

        self.config._attn_implementation = "sdpa"
        options = {"dtype": dtype}
        if TRANSFORMERS_4:  # without low_cpu_mem_usage, random weights are made first
            options = {"torch_dtype": dtype, "low_cpu_mem_usage": True}
        try:
            with quiet():
                model = AutoModelForCausalLM.from_pretrained(
                    self.directory,
                    config=copy.deepcopy(self.config),
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    **options,
                )
        except Exception as error:
            if is_for_memory(error):
                raise
            raise UserError(f"{self.name}: {one_line(error)}") from None
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise UserError(f"{self.name}: non-finite values in {name}")
        if dtype == torch.float64:
            compute_in_float64(model)
        return model.to(device).eval()

    def check_names(self):
        """Refuse missing, unexpected or misshapen tensors: transformers would only warn."""
        expected, found = self.shapes, {name: file[-1] for name, file in self.files.items()}
        embedding = self.family.embedding_weight
        both = self.config.tie_word_embeddings and found.pop(HEAD, None) and embedding in found
        if both and not torch.equal(self.read(HEAD), self.read(embedding)):
            raise UserError(
                f"{self.name}: config.json ties lm_head.weight to the embedding, "
                "but the file has another one"
            )
        found = {name: shape for name, shape in found.items() if not NO_PARAMETERS.search(name)}
        for name in sorted(expected.keys() | found.keys()):
            if name not in found:
                raise UserError(f"{self.name}: tensor {name} is missing")
            if name not in expected:
                raise UserError(f"{self.name}: unexpected tensor {name}")
            if found[name] != expected[name]:
                raise UserError(
                    f"{self.name}: tensor {name} has shape {found[name]}, "
                    f"config.json says {expected[name]}"
                )

    def read(self, name, shard=None):
        """Read one tensor, or its region `shard`, a slice for each dim, on the CPU."""
        if not self.directory:
            return self.random(name, shard)
        from safetensors import safe_open

        # Opened anew for each tensor: a mapped file counts as this process's memory.
        path, key, shape = self.files[name]
        with safe_open(path, framework="pt") as file:
            values = file.get_slice(key)[shard or tuple(map(slice, shape))]
        if not values.isfinite().all():
            raise UserError(f"{self.name}: non-finite values in {name}")
        return values

    def random(self, name, shard):
        """Return seeded values, the same however sliced; in blocks of rows, to save memory."""
        shape = self.shapes[name]
        first, *others = shard or [slice(0, size) for size in shape]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        pieces, rows = [], 4096
        for row in range(0, shape[0], rows):
            block = torch.empty(min(rows, shape[0] - row), *shape[1:])
            block.normal_(std=self.config.initializer_range, generator=generator)
            local = slice(max(first.start - row, 0), max(first.stop - row, 0))
            pieces.append(block[(local, *others)].clone())
        values = torch.cat(pieces)
        return values + 1 if NORM.search(name) else values

    def dtype(self):
        """Return the configuration's dtype, or else the first weight's: transformers' "auto"."""
        config = self.family.config_class.from_dict(self.settings)  # self.config is without it
        # In transformers 4 it has another name.
        said = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if said is not None:
            return said if isinstance(said, torch.dtype) else getattr(torch, said)
        name, shape = next(iter(self.shapes.items()))
        if self.files:  # their first may be a tied head, which `shapes` lacks
            name, (*_, shape) = next(iter(self.files.items()))
        return self.read(name, (slice(0, 1),) * len(shape)).dtype

    def tokenizer(self):
        """Return the model's tokenizer, or None for random weights or a directory without one.

        AutoTokenizer reads it. Raises UserError where it cannot, or finds no vocabulary.
        """
        folder = self.directory
        files = sorted(
            {path.name for name in TOKENIZER for path in folder.glob(name)} if folder else []
        )
        if not files:
            return None
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise UserError(
                f"{self.name}: tokenizer ({', '.join(files)}): {one_line(error)}"
            ) from None
        # Without vocabulary files some classes make an empty tokenizer. Byte tokenizers need none.
        words = set(type(tokenizer).vocab_files_names.values())
        by_version = any(re.fullmatch(r"tokenizer\..*\.json", name) for name in files)
        by_library = tokenizer.is_fast and "tokenizer.json" in files
        if words and not words & set(files) and not by_version and not by_library:
            raise UserError(
                f"{self.name}: tokenizer ({', '.join(files)}): no vocabulary is there "
                f"({' or '.join(sorted(words))})"
            )
        known = max(tokenizer.get_vocab().values(), default=-1) + 1
        if known > self.config.vocab_size:
            raise UserError(
                f"{self.name}: the tokenizer knows {known} tokens, the model only "
                f"{self.config.vocab_size}"
            )
        return tokenizer


def from_pretrained(parallelize, name_or_folder, dtype=None, device="cpu"):
    """Load a Llama that `parallelize` splits in place, of which each rank reads its own slices.

    Or a Mistral, Qwen2, Qwen3 or SmolLM3.

    parallelize: `partial(tensor_parallelize, mesh=mesh)`, say, which is given the model on the meta
    device; None: the full model, by transformers. name_or_folder: a directory of safetensors, in
    one file or several, or an id on the hub. dtype: by default the configuration's, else that of
    the weights. Each rank calls it; nothing is sent. Raises UserError, with one line, for what
    cannot be loaded: no such model, a tensor that is missing, unexpected or of another shape.
    """
    name = str(name_or_folder)
    if Path(name).is_dir():  # also one that is called "tiny"
        name = str(Path(name).absolute())
    elif is_remote(name):
        download(name)
    source = Source(name, model_types=LLAMAS)
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype)
    for setting in "use_cache", "output_hidden_states", "output_attentions":
        if setting in source.settings:  # the scripts' own runs do without
            setattr(source.config, setting, source.settings[setting])
    model = source.load_model(dtype or source.dtype(), device, parallelize)
    model.name_or_path = model.config._name_or_path = str(name_or_folder)  # an adapter's base
    return model


def find_preset(name, model_types):
    """Return a random/ model's settings. Raise UserError if there are none, or of another kind."""
    presets = {
        f"random/{preset}": {"model_type": family.model_type} | settings
        for family, of_family in ((LLAMA, PRESETS), (GPT2, GPT2_PRESETS))
        for preset, settings in of_family.items()
    }
    if name not in presets:
        known = [key for key, config in presets.items() if config["model_type"] in model_types]
        raise UserError(f"--model {name}: no such preset; there are {', '.join(known)}")
    refuse_family(name, presets[name]["model_type"], model_types)
    return presets[name]


@contextmanager
def quiet():
    """Silence transformers' progress bars and warnings, as a context: what they tell is checked."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def is_hub_id(name):
    """Return whether `name` can only be a model on the hub: `org/model`, and no directory here."""
    return bool(re.fullmatch(r"[\w-][\w.-]{0,99}/[\w-][\w.-]{0,99}", name)) and not (
        name.startswith("random/") or Path(name).exists()
    )


def is_remote(name):
    """Return whether `name` is a model that has to be fetched first, by `download`."""
    return name == "smollm2" or is_hub_id(name)


def cache_folder():
    """Return the folder where this project keeps what it fetches, other than from the hub."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise UserError("no home folder to cache a model in: set XDG_CACHE_HOME") from None
    return Path(caches) / "parallel_llama"


def download(name, offline=False):
    """Return the cache's directory with a model's files, which are fetched if need be."""
    if name == "smollm2":
        return smollm2.find(cache_folder(), offline)
    from huggingface_hub import HfApi, snapshot_download

    reason = None
    if not offline:
        try:
            HfApi().repo_info(name, timeout=8)  # the call below might wait for ever
        except Exception as error:
            reason, offline = error, True
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.safetensors", "*.json", "*.jinja", *TOKENIZER],
                etag_timeout=5,
                local_files_only=offline,
            )
        )
    except Exception as error:
        reason = re.sub(r"hf_\w+", "hf_...", one_line(reason or error)[:200])
        raise UserError(
            f"--model {name}: neither downloaded nor in the cache ({reason}); "
            "give a local directory, or --model tiny"
        ) from None


def find_directory(name):
    if name == "tiny":
        return TINY
    if is_remote(name):
        return download(name, offline=True)  # Run.source has fetched it
    try:
        directory = Path(name).expanduser()
        exists = directory.is_dir()
        if exists and not os.access(directory, os.R_OK | os.X_OK):
            raise UserError(f"--model {name}: you may not open this directory")
    except (OSError, RuntimeError):  # a name too long, no such user
        exists = False
    if not exists:
        raise UserError(f"--model {name}: no such directory (hub ids look like org/model)")
    return directory


def read_settings(directory, model_types=ONLY_LLAMA):
    """Read config.json as transformers does, if it is one of these kinds of model.

    For another kind the library would build a 7B Llama, with a warning.
    """
    from transformers import LlamaConfig

    path = directory / "config.json"
    if not path.exists():
        raise UserError(f"{directory}: no config.json there")
    try:
        path.read_bytes()  # says why, where the file cannot be read
        settings, _ = LlamaConfig.get_config_dict(directory, local_files_only=True)
        model_type = settings.get("model_type")
    except OSError as error:
        said = f"cannot be read ({error.strerror})" if error.strerror else "not valid JSON"
        raise UserError(f"{path}: {said}") from None
    except Exception as error:  # whatever the file holds instead
        raise UserError(f"{path}: not valid JSON for a model: {error!r}") from None
    refuse_family(directory, model_type, model_types)
    if settings.get("quantization_config"):
        raise UserError(f"{directory}: quantization_config: quantised models are not loaded")
    if settings.get("transformers_weights"):
        raise UserError(
            f"{path}: transformers_weights: only model.safetensors, or its index, is read"
        )
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{directory}: adapter_config.json: an adapter is not loaded; merge it into its model"
        )
    for name in "rope_parameters", "rope_scaling":
        if not isinstance(settings.get(name) or {}, dict):
            raise UserError(f"{path}: {name} is {settings[name]!r}, not a dict")
    return as_transformers_4(settings) if TRANSFORMERS_4 and model_type in LLAMAS else settings


def as_transformers_4(settings):
    """Turn rotary settings as transformers 5 writes them into those of transformers 4."""
    rope = settings.pop("rope_parameters", None)
    rope = dict(settings.get("rope_scaling") or rope or {})
    settings["rope_theta"] = rope.pop("rope_theta", settings.get("rope_theta", 10000.0))
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    plain = rope.get("rope_type", "default") == "default"
    settings["rope_scaling"] = None if plain else rope
    return settings


def read_generation(directory):
    """Read generation_config.json as transformers does; without one, config.json's part of it."""
    from transformers import GenerationConfig

    path, options = directory / "generation_config.json", {}
    if not path.exists():
        path, options = directory / "config.json", {"_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(
            directory, config_file_name=path.name, local_files_only=True, **options
        )
    except Exception as error:
        raise UserError(f"{path}: {one_line(error)}") from None


def rename(files, expected, tied, family=LLAMA):
    """Rename what `index_files` gives, as transformers does: to the names that the model has.

    A LlamaModel's names lack the prefix `model.`, and some tools put it before every name. (The
    names of a GPT2Model, as on the hub, lack `transformer.`.) Where embeddings are tied, one of the
    two names is enough, except in transformers 4. expected: the model's names.
    """
    base = family.base
    if TRANSFORMERS_4 and (HEAD in files or any(k.startswith(base) for k in files)):
        return files  # transformers 4 renames a bare LlamaModel's alone

    def name_of(key):
        for name in key.removeprefix(f"{base}."), f"{base}.{key}":
            if name in expected and name not in files:
                return name
        return key

    found = {name_of(key): value for key, value in files.items()}
    if tied and HEAD in found:
        found.setdefault(family.embedding_weight, found[HEAD])
    return found


def index_files(directory):
    """Return {tensor name: (file, name there, shape)} of a directory's safetensors, sharded or not.

    A single file takes precedence over an index, as in transformers: `save_pretrained` of a single
    file leaves the index of earlier shards there.
    """
    index = directory / "model.safetensors.index.json"
    single = (directory / "model.safetensors").exists()
    if index.exists() and not single:
        try:
            content = json.loads(index.read_text())
            names = set(content["weight_map"].values())
            assert all(isinstance(name, str) for name in names), "file names must be strings"
            wanted = 'transformers wants an entry "metadata", such as {}'
            assert isinstance(content.get("metadata"), dict), wanted
        except Exception as error:  # whatever the file holds instead
            raise UserError(f"{index}: damaged index: {error!r}") from None
    elif single:
        names = {"model.safetensors"}
    elif list(directory.glob("*.bin")):
        raise UserError(f"{directory}: pickle weights are not loaded; convert to safetensors")
    else:
        raise UserError(f"{directory}: no model.safetensors there")
    files = {}
    for name in sorted(names):
        if os.path.basename(name) != name:
            raise UserError(f"{index}: names {name!r}, which is outside its directory")
        files |= read_header(directory / name)
    return files


def read_header(path):
    """Return what `index_files` does, of one file, checked for truncation and dtypes."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (path, name, tuple(view.get_shape())) for name, view in views.items()}
            dtypes = {name: view.get_dtype() for name, view in views.items()}
    except FileNotFoundError:  # safetensors raises this where it may not read, too
        said = "cannot be read" if path.exists() else "missing"
        raise UserError(f"{path}: {said}") from None
    except Exception as error:
        if is_for_memory(error):
            raise
        raise UserError(f"{path}: damaged safetensors file ({error})") from None
    for name, dtype in dtypes.items():
        if not NO_PARAMETERS.search(name) and dtype not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{path}: tensor {name} is {dtype}, not a float")
    return found
