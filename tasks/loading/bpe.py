"""The tokenizer of a pretraining: the embedded model's, a file's, or one that is trained on the
text, byte-level BPE. Each has the tokens [BOT], [EOT] and [PAD].
"""

import os
import tempfile
from pathlib import Path

from tqdm import tqdm

from loading.models import TINY
from utils.errors import UserError, one_line

BOT, EOT, PAD = SPECIAL = "[BOT]", "[EOT]", "[PAD]"
NAME = "tokenizer.json"
BYTES = 256  # each is a token, so that every text has tokens


def embedded_tokenizer():
    """Return the embedded model's tokenizer, with the three special tokens added."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY, padding_side="right")
    tokenizer.add_special_tokens({"bos_token": BOT, "eos_token": EOT, "pad_token": PAD})
    return tokenizer


def file_of(where):
    """Return the file that --tokenizer names: itself, or tokenizer.json in that folder."""
    path = Path(where).expanduser()
    return path if path.suffix == ".json" and not path.is_dir() else path / NAME


def read_tokenizer(where, vocab_size):
    """Read the tokenizer of a file or folder, as `tokenizers` writes it.

    Raises UserError where there is none, for one without the special tokens, and for one of more
    than vocab_size tokens.
    """
    from tokenizers import Tokenizer

    path = file_of(where)
    if not path.is_file():
        raise UserError(
            f"--tokenizer {where}: no tokenizer there ({path} is no file); "
            "pretrain_2d.py --train-tokenizer VOCABULARY_SIZE makes one"
        )
    try:
        found = Tokenizer.from_file(str(path))
        vocabulary = found.get_vocab()
        tokenizer = wrap(found)
    except Exception as error:  # whatever the file holds instead
        raise UserError(f"--tokenizer {path}: not read ({one_line(error)})") from None
    missing = [token for token in SPECIAL if token not in vocabulary]
    if missing:
        raise UserError(f"--tokenizer {path}: without {', '.join(missing)}")
    known = max(vocabulary.values()) + 1
    if known > vocab_size:
        raise UserError(f"--tokenizer {path}: {known} tokens, the model has only {vocab_size}")
    return tokenizer


def wrap(found):
    """Return a `tokenizers.Tokenizer`, which has the special tokens, in transformers' class."""
    from transformers import PreTrainedTokenizerFast

    names = dict(bos_token=BOT, eos_token=EOT, pad_token=PAD)
    return PreTrainedTokenizerFast(tokenizer_object=found, padding_side="right", **names)


def check_trainable(where, size, vocab_size):
    """Raise UserError for a --train-tokenizer that would be of no use, before any work."""
    if where is None:
        raise UserError("--train-tokenizer needs --tokenizer: where to write it")
    least = BYTES + len(SPECIAL)
    if not least <= size <= vocab_size:
        raise UserError(
            f"--train-tokenizer {size}: take {least} (the bytes and the special "
            f"tokens) to {vocab_size} (the model's)"
        )
    folder = file_of(where).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file_of(where).is_file():
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(f"--tokenizer {where}: cannot be written ({error.strerror})") from None


def train_tokenizer(texts, size):
    """Train a byte-level BPE tokenizer of at most `size` tokens; return a `tokenizers.Tokenizer`.

    texts: strings, which are read one after another. The same texts give the same tokenizer. It has
    fewer tokens if no further pair of tokens occurs twice.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bar = tqdm(
        texts, "train tokenizer", unit="document", mininterval=2.0, leave=False, disable=None
    )
    tokenizer.train_from_iterator(bar, trainer)
    return tokenizer


def write_tokenizer(tokenizer, where):
    """Write a tokenizer to the file that `where` names, whole or not at all; return its path.

    Raises UserError where it cannot be written.
    """
    path = file_of(where)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(tokenizer.to_str(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"--tokenizer {where}: cannot be written ({error.strerror})") from None
    return path
