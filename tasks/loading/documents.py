"""Documents to train on, as rows of tokens.

A row has one document, cut off or padded to a length, or several, packed.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, pairwise

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset
from tqdm import tqdm

from loading import bpe
from loading.batches import pad
from loading.bpe import BOT, EOT, PAD
from loading.text import BETWEEN, encode, find_text, has_own_text, is_url, own_stories, read_some
from loading.text_files import TextFile, index
from utils.errors import UserError

OWN = 240  # stories of the project's own, unless their number is given
HELD = 1000  # how many documents are held out, unless a batch is larger
AT_ONCE = 1000  # documents that are tokenized together
PLAIN = {"verbose": False, "add_special_tokens": False}  # what a tokenizer is called with
BIGRAM = 20_000  # documents that a bigram model is made of, at most


class Texts(list):
    """Documents in memory, as strings. between: see `text_files.TextFile`."""

    between = False

    @property
    def digest(self):
        """The SHA-256 of all texts, in hex."""
        return hashlib.sha256("\0".join(self).encode()).hexdigest()


def read_documents(run, where, count):
    """Read a text's documents on every rank, none twice. Return (its name, a sequence of strings).

    where: a file, whose paragraphs, or lines of JSON, are the documents; a URL, whose paragraphs
    are; or None: stories of the project's own. A file is not held in memory (`text_files`), and all
    ranks must see it. count: how many; None is all of a text, or OWN stories. Raises UserError, on
    all ranks, for what cannot be read or has fewer documents.
    """
    source = run.source  # all ranks must ask for it together

    def load():
        if where is None:
            return Texts(islice(once_each(own_stories(run.seed)), count or OWN))
        if not is_url(where):
            return index(where, count)
        name, text = find_text(where, source, 0, run.seed)
        documents = Texts(islice(once_each(paragraphs(text)), count))
        documents.between = name.endswith(BETWEEN)
        return documents

    found = run.once("text", load)
    documents = found if isinstance(found, Texts) else run.together(lambda: TextFile(*found))
    if len(documents) < (count or 1):
        raise UserError(
            f"--text {where}: {len(documents)} different documents, but "
            f"--num-documents {count or 1}"
        )
    if where is None:
        return f"stories of the project's own (seed {run.seed})", documents
    return f"{where}{BETWEEN * documents.between}", documents


def find_tokenizer(run, documents, where, size):
    """Read the tokenizer of a pretraining, or train it. Return (tokenizer, what to call it).

    where: a file or folder; None is the embedded model's. size: where there is no tokenizer yet,
    rank 0 trains one of at most so many tokens on the documents, and writes it there. None: one
    must be there. Raises UserError as `bpe.read_tokenizer`, and where it cannot be written.
    """
    vocab_size = run.source.config.vocab_size
    if size is not None:
        run.together(lambda: bpe.check_trainable(where, size, vocab_size))
    if where is None:
        return bpe.embedded_tokenizer(), "the embedded model's"

    def train():
        if bpe.file_of(where).is_file():
            return "note: a tokenizer is there already: it is not trained again"
        found = bpe.train_tokenizer(documents, size)
        path, number = bpe.write_tokenizer(found, where), found.get_vocab_size()
        return f"trained a tokenizer of {number} tokens on {len(documents)} documents: {path}"

    if size is not None:
        run.print0(run.once("tokenizer", train))
    return run.together(lambda: bpe.read_tokenizer(where, vocab_size)), str(where)


def load_rows(run, where, count, length, batch_size, tokenizer=None, train=None):
    """Return a tokenizer, and `count` documents as two `Rows`: to train on, and a tenth, held out.

    where, count: see `read_documents`. tokenizer, train: see `find_tokenizer`. Whole batches are
    held out: at most HELD documents, or one batch if that is more. These are not trained on. Raises
    UserError, on all ranks, as these two do, and where a tenth of the documents is no full batch.
    """
    name, documents = read_documents(run, where, count)
    count = len(documents)
    if length < 3:
        raise UserError(f"--seq-len {length}: too short to compare, use 3 or more")
    held = min(count // 10, max(HELD, batch_size)) // batch_size * batch_size
    if not held:
        raise UserError(
            f"{count} documents: a tenth of them, which is held out, is less than "
            f"a batch of {batch_size}"
        )
    tokenizer, whose = find_tokenizer(run, documents, tokenizer, train)
    run.print0(
        f"text: {count} documents of {name}, {held} of them held out; tokenizer: {whose}, "
        f"{len(tokenizer)} tokens"
    )
    rest = run.once("rows", lambda: indices_to_train_on(documents, held, tokenizer, length)).cpu()
    if len(rest) < batch_size:
        raise UserError(
            f"--seq-len {length}: all but {len(rest)} documents, cut off there, equal one that is "
            "held out"
        )
    if len(rest) < count - held:
        run.print0(
            f"note: {count - held - len(rest)} documents, cut off, equal one that is held out: "
            "they are left out"
        )
    parts = [Tokenized(documents, indices, tokenizer) for indices in (rest, torch.arange(held))]
    return tokenizer, *(Rows(part, length, tokenizer) for part in parts)


def indices_to_train_on(documents, held, tokenizer, length):
    """Return indices, int64, of the documents whose row is not one of the first `held` documents'.

    Every document is tokenized once for this. Only the rows that are held out are kept in memory.
    """
    kept, first = [], set()
    begins = range(0, len(documents), AT_ONCE)
    bar = tqdm(
        begins,
        "compare with what is held out",
        unit=f"{AT_ONCE} documents",
        mininterval=2.0,
        leave=False,
        disable=None,
    )
    for begin in bar:
        here = range(begin, min(begin + AT_ONCE, len(documents)))
        texts = [documents[i] for i in here]
        for i, tokens in zip(here, tokenizer(texts, **PLAIN)["input_ids"], strict=True):
            row = tuple(tokens[: length - 1])  # as `Rows` cuts it
            if i < held:
                first.add(row)
            elif row not in first:
                kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


class Tokenized(Sequence):
    """The tokens of some documents. Each is tokenized when it is asked for, and nothing is kept.

    indices: those of the documents, 1-D int64.
    """

    def __init__(self, documents, indices, tokenizer):
        self.documents, self.indices, self.tokenizer = documents, indices, tokenizer

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        return self.tokenizer(self.documents[self.indices[i].item()], **PLAIN)["input_ids"]


def paragraphs(text):
    """Return a text's paragraphs: what is between blank lines."""
    return filter(None, map(str.strip, re.split(r"\n\s*\n", text)))


def once_each(texts):
    """Yield texts that have not come before: what is held out must not be trained on, too."""
    seen = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


class Rows(Dataset):
    """A row for each document: ids and labels, (length,), of [BOT], the text, [EOT], cut off.

    The rest of a row is [PAD], whose labels are -100.
    """

    def __init__(self, documents, length, tokenizer):
        self.documents, self.length = documents, length
        self.begin, self.end, self.pad = tokenizer.convert_tokens_to_ids([BOT, EOT, PAD])

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i):
        row = torch.tensor([self.begin, *self.documents[i], self.end][: self.length])
        ids, labels = torch.full((2, self.length), self.pad)
        labels.fill_(-100)
        ids[: len(row)] = labels[: len(row)] = row
        return ids, labels


# ---------------------------------------------------------------- packed rows


def load_documents(run, where, count, length, virtual):
    """Return `count` rows, on every rank: lists of documents, 1-D tensors; none is in two rows.

    length: a row's positions. virtual: how many of them, before each document, are virtual tokens.
    where: as in `load_sequences`. Documents are the paragraphs of a text, or the stories if the
    text is the project's own. Rank 0 alone reads it. Raises UserError, on all ranks, as
    `load_sequences` does.
    """
    tokenizer, source = run.tokenizer, run.source

    def load():
        if run.rank:
            return None
        needed = count * length
        if has_own_text(where, source):
            name = f"stories of the project's own (seed {run.seed})"
            texts = own_stories(run.seed, needed)
        else:
            name, text = read_some(run, where, needed)
            texts = paragraphs(text)
        documents = (encode(tokenizer, text, source.config.vocab_size) for text in texts)
        rows = fill(documents, count, length, virtual)
        if len(rows) < count:
            raise UserError(
                f"--text {name}: paragraphs of {least(virtual)} tokens or more fill "
                f"{len(rows)} rows, but {count} are needed: give a longer text, or ask "
                "for fewer"
            )
        return name, rows

    name, rows = run.broadcast(run.together(load))
    sizes = [virtual + len(document) for row in rows for document in row]
    kind = "" if tokenizer else "; no tokenizer: its bytes are the tokens"
    run.print0(
        f"text: {len(sizes)} documents of {name} in {count} rows, "
        f"{sum(sizes) / count / length:.0%} of the positions used{kind}"
    )
    if len(sizes) == count:
        run.print0("note: no row has two documents; a longer --seq-len has room for more")
    return [[torch.tensor(document) for document in row] for row in rows]


def fill(documents, count, length, virtual):
    """Fill at most `count` rows with documents, in order; one that does not fit begins a new row.

    A document that is longer than a row is cut off at its end. One of fewer than `least` tokens is
    left out.
    """
    rows, left = [], 0
    for document in documents:
        document = document[: length - virtual]
        if len(document) < least(virtual):
            continue
        if virtual + len(document) > left:
            if len(rows) == count:
                break
            rows.append([])
            left = length
        rows[-1].append(document)
        left -= virtual + len(document)
    return rows


def least(virtual):
    """Return how many tokens a document needs to be trained on.

    With two tokens and no virtual ones, the only query that has a label sees one key: a batch of
    such documents has some zero gradients.
    """
    return 2 if virtual else 3


def pack(rows, length, virtual):
    """Pack rows of documents: (rows, 2, length), tokens and each one's position in its document.

    A token of -100 is a virtual token, in front of a document, or a filler at the end of a row. The
    fillers of a row are a last document of their own.
    """
    packed = torch.full((len(rows), 2, length), -100)
    for (ids, positions), row in zip(packed, rows, strict=True):
        pieces = [F.pad(document, (virtual, 0), value=-100) for document in row]
        pieces.append(ids[sum(map(len, pieces)) :])
        ids[:] = torch.cat(pieces)
        positions[:] = torch.cat([torch.arange(len(piece)) for piece in pieces])
    return packed


def one_by_one(rows, device):
    """Return a batch of some rows' documents, padded, as the unmodified model takes it."""
    documents = list(chain(*rows))
    ids, mask, labels = pad(documents, max(map(len, documents)))
    inputs = dict(input_ids=ids, labels=labels) | ({} if mask.all() else {"attention_mask": mask})
    return {name: tensor.to(device) for name, tensor in inputs.items()}


# ---------------------------------------------------------------- a yardstick


def bigram_loss(rows, held, vocab_size):
    """Return the mean loss on `held` of a bigram model of `rows`, smoothed as suits it best.

    rows, held: datasets of (ids, labels); of rows the first BIGRAM are counted.

        p(b | a) = (n(a, b) + s p(b)) / (n(a) + s), and p(b) = (n(b) + 1) / (n + V)
    """

    def tokens(dataset):
        return [labels[labels != -100].tolist() for _, labels in dataset]

    seen, pairs, first = Counter(), Counter(), Counter()
    for row in tokens(Subset(rows, range(min(len(rows), BIGRAM)))):
        seen.update(row)
        first.update(row[:-1])
        pairs.update(pairwise(row))

    every = seen.total() + vocab_size

    def loss(s):
        losses = []
        for a, b in (pair for row in tokens(held) for pair in pairwise(row)):
            alone = (seen[b] + 1) / every
            losses.append(-math.log((pairs[a, b] + s * alone) / (first[a] + s)))
        return sum(losses) / len(losses)

    return min(map(loss, (0.3, 1, 3, 10, 30, 100)))
