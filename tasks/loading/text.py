"""The text that a task trains on: a file, a URL that is fetched once, or the project's own."""

import hashlib
import http.client
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch

from loading.models import TINY, cache_folder
from utils.errors import UserError

ULYSSES = "https://www.gutenberg.org/cache/epub/4300/pg4300.txt"  # the assignment's example
BETWEEN = " (what is between Project Gutenberg's marks)"
ENOUGH = 10**7  # characters; no more of a text is turned into tokens, unless more are needed
# A mark begins a line, and ends in stars at the end of that line or of one of the next two, for a
# book's title may be long. The same words in prose, or without these stars, are no mark.
# (It allows line ends of all kinds, since `text_files` looks for it in a file's bytes.)
MARK = re.compile(
    r"(?:\A|(?<=[\r\n]))(?:\ufeff)?"
    r"\*\*\* ?(START|END) OF TH(?:E|IS) PROJECT GUTENBERG EBOOK[^\r\n]*?"
    r"(?:(?>\r\n|\r|\n)(?!\*\*\*|[ \t]*(?=[\r\n]|\Z))[^\r\n]*?){0,2}?\*\*\*[ \t]*(?=[\r\n]|\Z)",
)


def load_sequences(run, where, count, seq_len):
    """Return `count` sequences from the start of a text, (count, seq_len), on every rank.

    Rank 0 alone reads it. where: a file, a URL, or None. None is the book above for models from the
    hub or a directory; for other models, and where the book is out of reach, it is the project's
    own stories. Without a tokenizer the tokens are the text's bytes. Raises UserError, on all
    ranks, for what cannot be read, is not UTF-8, or is too short.
    """
    tokenizer, needed = run.tokenizer, count * seq_len

    def load():
        if run.rank:
            return None
        name, text = read_some(run, where, needed)
        tokens = encode(tokenizer, text, run.source.config.vocab_size)
        if len(tokens) < needed:
            raise UserError(
                f"--text {name}: {len(tokens)} tokens, but {needed} are needed: give a "
                "longer text, or a smaller --seq-len"
            )
        return name, torch.tensor([tokens])

    found = run.together(load)
    name, ids = found or (None, None)
    kind = "" if tokenizer else "; no tokenizer: its bytes are the tokens"
    run.print0(f"text: {name}{kind}")
    ids = run.broadcast(ids)
    run.print0(f"Cropping input_ids.shape[1]={ids.shape[1]} to {needed} tokens")
    return ids[:, :needed].view(count, seq_len)


def read_some(run, where, needed):
    """Return `find_text`, cut to what `needed` tokens can take. Raise UserError if it is empty."""
    name, text = find_text(where, run.source, needed, run.seed)
    if not text.strip():
        raise UserError(f"--text {name}: no text in it")
    enough = max(ENOUGH, 100 * needed)
    if len(text) > enough:
        run.print0(f"note: only the first {enough} characters of {name} are used")
    return name, text[:enough]


def encode(tokenizer, text, vocab_size):
    """Return a text's tokens; without a tokenizer its bytes."""
    if tokenizer:
        return tokenizer(text, verbose=False)["input_ids"]
    return [byte % vocab_size for byte in text.encode()]


def has_own_text(where, source):
    """Return whether the text is one that the project writes."""
    return where is None and (source.directory in (None, TINY) or source.name == "smollm2")


def find_text(where, source, needed, seed):
    """Return (what to call the text, the text)."""
    from loading.text_files import has_json_lines, read_json_lines  # it imports this module

    if where is not None and not is_url(where) and has_json_lines(where):
        return where, read_json_lines(where, max(ENOUGH, 100 * needed))
    if where is not None and not is_url(where):
        return between_marks(where, decode(read_file(where), where))
    if has_own_text(where, source):
        return own_text(needed, seed)
    url = where or ULYSSES
    try:
        return between_marks(url, decode(fetch(url), url))
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        if where:
            raise UserError(f"--text {url}: not fetched ({error}); give a file") from None
        name, text = own_text(needed, seed)
        return f"{name}, since {url} is out of reach ({error})", text


def between_marks(name, text):
    """Return a text's name, which tells if parts are left out, and the kept parts: see `books`."""
    if MARK.search(text):
        name += BETWEEN
    return name, "\n\n".join(books(text)).strip("\n")


def own_stories(seed, needed=0):
    """Return stories that the project writes, without end. needed: tokens that are wanted."""
    limit_own(needed)
    sys.path.insert(0, str(TINY))
    from corpus import stories

    return stories(seed)


def own_text(needed, seed):
    """Return (name, stories that the project writes), enough of them for `needed` tokens.

    On average a token has fewer than 8 characters.
    """
    limit_own(needed)
    sys.path.insert(0, str(TINY))
    from corpus import text

    length = max(100_000, 8 * needed)
    return f"stories of the project's own (seed {seed})", text(seed, length, separator="\n\n")


def limit_own(needed):
    if needed > 10**8:
        raise UserError(
            f"{needed} tokens are more than the project writes: take fewer, or a text of your own"
        )


def is_url(where):
    return bool(re.match(r"https?://", where))


def read_file(path):
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # a RuntimeError: no such ~user
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--text {path}: cannot be read ({reason})") from None


def fetch(url):
    """Return the bytes behind a URL; fetched once, then from the user's cache folder."""
    cache = cache_folder()
    path = cache / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.txt"
    if path.exists():
        return path.read_bytes()
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise OSError("HF_HUB_OFFLINE is 1")
    with urllib.request.urlopen(url, timeout=10) as answer:
        content = answer.read()
    cache.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)  # whole or not at all
    return content


def decode(content, name, begin=0):
    """Return the text of UTF-8 bytes, without a byte-order mark, and as `plain` gives it.

    begin: their offset in the file.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "not UTF-8"
        where = f"byte {content[error.start]:#04x} at offset {begin + error.start}"
        raise UserError(
            f"--text {name}: {kind}: {where}; convert it, as with iconv -t utf-8"
        ) from None
    return plain(text)


def plain(text):
    """Return the text with LF line ends and without NULs."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def books(text):
    """Return what is between Project Gutenberg's marks, of each book; without marks, all as one."""
    pieces = MARK.split(text)  # text, mark, text, mark, ..., text
    marks = [None, *pieces[1::2]]
    if "START" not in marks:  # at most an end
        return pieces[:1]
    pairs = zip(marks, pieces[::2], strict=True)
    return [piece.strip("\n") for mark, piece in pairs if mark == "START"]
