"""Documents of a text file that need not fit in memory: an index of where each one lies.

A file of JSON lines has one object a line, whose "text" is a document. In a plain text paragraphs
are the documents. `index` reads the file once and keeps two numbers a document; `TextFile` reads a
document from the disk when it is asked for.
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from loading.text import MARK, decode, plain
from utils.errors import UserError

SUFFIXES = ".jsonl", ".ndjson", ".json"  # names of files of JSON lines end so
# A pattern for bytes knows no escape \ufeff: it gets the character's own bytes.
MARK_BYTES = re.compile(MARK.pattern.replace(r"\ufeff", "\ufeff").encode())
# A line end is atomic, (?>...): else \r\n would also match as two of them.
# For bytes, \s is ASCII's white space alone; a text's paragraphs are divided by all of Unicode's.
SPACES = b"|".join(re.escape(chr(i).encode()) for i in range(0x3001) if chr(i).isspace())
BLANK_LINES = re.compile(rb"(?>\r\n|\r|\n)(?:%s)*(?>\r\n|\r|\n)" % SPACES)


class TextFile(Sequence):
    """The documents of a file, as strings; none of them is held in memory.

    spans: (documents, 2), int64: the byte at which each begins, and its number of bytes. size: of
    the file, in bytes. digest: SHA-256 that stands for all documents' texts, in hex. between:
    whether only text between Project Gutenberg's marks is taken. Raises UserError for a file that
    is not there (on another machine, say), has another size, or changes later on.
    """

    def __init__(self, path, spans, size, digest, json_lines, between):
        self.path, self.spans = path, spans
        self.digest, self.json_lines, self.between = digest, json_lines, between
        self.state = self.state_of_file()
        if self.state[0] != size:
            raise UserError(f"--text {path}: {self.state[0]} bytes here, {size} on rank 0")

    def state_of_file(self):
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise UserError(f"--text {self.path}: cannot be read ({error.strerror})") from None
        return status.st_size, status.st_mtime_ns

    def __len__(self):
        return len(self.spans)

    def __getitem__(self, i):
        begin, size = self.spans[i].tolist()
        if self.state_of_file() != self.state:
            raise UserError(f"--text {self.path}: changed while it was used")
        with open(self.path, "rb") as file:  # anew: workers must not share a place in it
            file.seek(begin)
            content = file.read(size)
        text = json.loads(content)["text"] if self.json_lines else decode(content, self.path)
        return clean(text)


def clean(text):
    """Return a document as it is trained on: without blanks around it, see `text.plain`."""
    return plain(text).strip()


def open_text(where):
    """Open a file to read bytes from. Raise UserError where it cannot be read."""
    try:
        return Path(where).expanduser().open("rb")
    except (OSError, ValueError, RuntimeError) as error:  # a RuntimeError: no such ~user
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--text {where}: cannot be read ({reason})") from None


def has_json_lines(where):
    """Return whether a file has JSON lines: by its name, or if its first line is an object."""
    if not os.path.isfile(os.path.expanduser(where)):  # a pipe would lose the line
        return False
    if Path(where).suffix.lower() in SUFFIXES:
        return True
    with open_text(where) as file:
        first = file.readline(2**20)
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def read_json_lines(where, enough):
    """Return the documents of a file of JSON lines, with blank lines between.

    The last one is the first that ends beyond `enough` characters. Raises UserError as `index`.
    """
    texts, characters = [], 0
    with open_text(where) as file:
        for _, _, text in lines(file, where):
            texts.append(text)
            characters += len(text)
            if characters > enough:
                break
    return "\n\n".join(texts)


def index(where, count=None):
    """Return what `TextFile` is made of: a file's different documents, at most `count`.

    That is (path, spans, size, digest, json_lines, between). Raises UserError for a file that
    cannot be read, has no text, is not UTF-8, and for the first line that is no object with a
    "text".
    """
    path, json_lines = os.path.expanduser(where), has_json_lines(where)
    with open_text(where) as file:
        size = os.fstat(file.fileno()).st_size
        if not os.path.isfile(path):
            raise UserError(f"--text {where}: not a file")
        # Not closed here: a search that stopped half-way still refers to it.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    pieces = [(0, size)] if json_lines else book_spans(data)
    found = lines(data, where) if json_lines else paragraph_spans(data, pieces, where)
    spans, digest = different(found if size else [], size, count)
    if not spans:
        raise UserError(f"--text {where}: no text in it")
    return path, torch.tensor(spans), size, digest, json_lines, pieces != [(0, size)]


def different(found, size, count):
    """Return the spans of at most `count` documents, each text once, and a digest of them all.

    found: (begin, bytes, text) of each document.
    """
    spans, seen, total = [], set(), hashlib.sha256()
    bar = tqdm(
        total=size,
        desc="index",
        unit="B",
        unit_scale=True,
        mininterval=2.0,
        leave=False,
        disable=None,
    )
    for begin, length, text in found:
        bar.update(begin + length - bar.n)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            total.update(digest)
            spans.append((begin, length))
            if len(spans) == count:
                break
    bar.close()
    return spans, total.hexdigest()


def lines(data, path):
    """Yield (begin, bytes, text) of each line of JSON; blank ones are left out.

    data: has `readline`.
    """
    begin, number = 0, 0
    while line := data.readline():
        number += 1
        here, begin = begin, begin + len(line)
        if line.strip():
            yield here, len(line), text_of(line, f"--text {path}: line {number}")


def text_of(line, where):
    """Return the "text" of a line of JSON. where: how an error message begins."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{where} is no JSON object, {{...}}")
    if not isinstance(content.get("text"), str):
        raise UserError(f'{where} has no "text" that is a string')
    text = clean(content["text"])
    if not text:
        raise UserError(f'{where}: an empty "text"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f'{where}: half a surrogate pair in "text"') from None
    return text


def paragraph_spans(data, pieces, path):
    """Yield (begin, bytes, text) of each paragraph in the pieces: spans, as `book_spans` gives."""
    for first, last in pieces:
        begin = first
        for gap in chain(BLANK_LINES.finditer(data, first, last), [None]):
            end, after = gap.span() if gap else (last, last)
            text = clean(decode(data[begin:end], path, begin))
            if text:
                yield begin, end - begin, text
            begin = after


def book_spans(data):
    """Return (begin, end) of each text between Project Gutenberg's marks: as `text.books` does."""
    if data.find(b"PROJECT GUTENBERG EBOOK") < 0:
        return [(0, len(data))]
    marks = list(MARK_BYTES.finditer(data))
    kinds = [None, *(mark[1] for mark in marks)]
    begins = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(data)]
    wanted = b"START" if b"START" in kinds else None
    pieces = zip(kinds, begins, ends, strict=True)
    return [(begin, end) for kind, begin, end in pieces if kind == wanted]
