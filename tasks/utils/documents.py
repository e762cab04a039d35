"""Documents to train on: each one row of tokens, clipped or padded to a length, or several packed
in a row.
"""

import math
import re
from collections import Counter
from itertools import chain, islice, pairwise

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from utils.batches import pad
from utils.errors import UserError
from utils.models import TINY
from utils.text import encode, find_text, has_own_text, own_stories, read_some

BOT, EOT, PAD = "[BOT]", "[EOT]", "[PAD]"
OWN = 240  # stories of the project's own, unless it is said how many


def load_rows(run, where, count, length, batch_size):
    """A tokenizer, and so many documents as `Rows`: to train on, and a tenth that is held out.

    count: None is all of a text, or OWN stories.

    The tokenizer is the embedded model's, with the three tokens above. where: a file or URL, whose
    paragraphs are the documents, none of them twice, or None: stories of the project's own. Rank 0
    alone reads it. What is held out is whole batches, and none of it is trained on. Raises
    UserError, on all ranks, for what cannot be read, has fewer documents, or of which a tenth is no
    batch.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY, padding_side="right")
    tokenizer.add_special_tokens({"bos_token": BOT, "eos_token": EOT, "pad_token": PAD})

    source = run.source  # which all ranks must ask for together

    def load():
        if run.rank:
            return None
        if where is None:
            name, texts = f"stories of the project's own (seed {run.seed})", own_stories(run.seed)
            texts = islice(texts, OWN) if count is None else texts
        else:
            name, text = find_text(where, source, 0, run.seed)
            texts = paragraphs(text)
        texts = list(islice(once_each(texts), count))
        if len(texts) < (count or 1):
            raise UserError(f"--text {name}: {len(texts)} different paragraphs, but "
                            f"--num-documents {count or 1}")  # fmt: skip
        return name, tokenizer(texts, verbose=False)["input_ids"]

    name, documents = run.broadcast(run.together(load))
    count = len(documents)
    if length < 3:
        raise UserError(f"--seq-len {length}: too short to compare, use 3 or more")
    held = count // 10 // batch_size * batch_size
    if not held:
        raise UserError(f"{count} documents: a tenth of them, which is held out, is less than "
                        f"a batch of {batch_size}")  # fmt: skip
    run.print0(f"text: {count} documents of {name}, {held} of them held out; tokenizer: the "
               f"embedded model's, {len(tokenizer)} tokens")  # fmt: skip
    first = {tuple(document[: length - 1]) for document in documents[:held]}  # as `Rows` cuts them
    rest = [one for one in documents[held:] if tuple(one[: length - 1]) not in first]
    if len(rest) < batch_size:
        raise UserError(f"--seq-len {length}: all but {len(rest)} documents are, cut off there, as "
                        "one that is held out")  # fmt: skip
    if len(rest) < count - held:
        run.print0(f"note: {count - held - len(rest)} documents are, cut off, as one that is held "
                   "out: they are left out")  # fmt: skip
    return tokenizer, *(Rows(part, length, tokenizer) for part in (rest, documents[:held]))


def paragraphs(text):
    """What blank lines lie between."""
    return filter(None, map(str.strip, re.split(r"\n\s*\n", text)))


def once_each(texts):
    """Those that have not come before: what is held out must not be trained on, too."""
    seen = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


class Rows(Dataset):
    """Of each document ids and labels, (length,): [BOT], the text, [EOT], cut off at the length.

    What is left is [PAD], whose labels are -100.
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
    """So many rows of whole documents, on every rank: of each row its documents' tokens, (S,).

    length, virtual: a row's positions, and of these the virtual tokens in front of each document.
    where: as in `load_sequences`. A text's paragraphs are its documents, and stories of the
    project's own. Rank 0 alone reads it. Raises UserError, on all ranks, as `load_sequences` does.
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
            raise UserError(f"--text {name}: paragraphs of {least(virtual)} tokens or more fill "
                            f"{len(rows)} rows, but {count} are needed: give a longer text, or ask "
                            "for fewer")  # fmt: skip
        return name, rows

    name, rows = run.broadcast(run.together(load))
    sizes = [virtual + len(document) for row in rows for document in row]
    kind = "" if tokenizer else "; no tokenizer: its bytes are the tokens"
    run.print0(f"text: {len(sizes)} documents of {name} in {count} rows, "
               f"{sum(sizes) / count / length:.0%} of the positions used{kind}")  # fmt: skip
    if len(sizes) == count:
        run.print0("note: no row has two documents; a longer --seq-len has room for more")
    return [[torch.tensor(document) for document in row] for row in rows]


def fill(documents, count, length, virtual):
    """At most so many rows, in the documents' order: what does not fit begins the next one.

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
    """Tokens of a document that is trained on. In front of the second of two nobody has a choice of
    keys, so that some gradients of a batch of these would be 0.
    """
    return 2 if virtual else 3


def pack(rows, length, virtual):
    """(rows, 2, length) of rows of documents: tokens, and each one's place in its document.

    -100 are the virtual tokens in front of each document, and filler, a last document of its own.
    """
    packed = torch.full((len(rows), 2, length), -100)
    for (ids, places), row in zip(packed, rows, strict=True):
        pieces = [F.pad(document, (virtual, 0), value=-100) for document in row]
        pieces.append(ids[sum(map(len, pieces)) :])
        ids[:] = torch.cat(pieces)
        places[:] = torch.cat([torch.arange(len(piece)) for piece in pieces])
    return packed


def one_by_one(rows, device):
    """What the unmodified model takes of some rows' documents: a batch of them, padded."""
    documents = list(chain(*rows))
    ids, mask, labels = pad(documents, max(map(len, documents)))
    inputs = dict(input_ids=ids, labels=labels) | ({} if mask.all() else {"attention_mask": mask})
    return {name: tensor.to(device) for name, tensor in inputs.items()}


# ---------------------------------------------------------------- a yardstick


def bigram_loss(rows, held, vocab_size):
    """The mean loss on `held` of a bigram model of `rows`, smoothed as suits it best.

    rows, held: datasets of (ids, labels). p(b | a) = (n(a, b) + s p(b)) / (n(a) + s), and
    p(b) = (n(b) + 1) / (n + V).
    """

    def tokens(of):
        return [labels[labels != -100].tolist() for _, labels in of]

    seen, pairs, first = Counter(), Counter(), Counter()
    for row in tokens(rows):
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
