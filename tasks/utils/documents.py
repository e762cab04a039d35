"""Documents to pretrain on: each one row of tokens, clipped or padded to a length."""

import re
from itertools import islice

import torch
from torch.utils.data import Dataset

from utils.errors import UserError
from utils.models import TINY
from utils.text import find_text, own_stories

BOT, EOT, PAD = "[BOT]", "[EOT]", "[PAD]"


def load_rows(run, where, count, length, batch_size):
    """A tokenizer, and so many documents as `Rows`: to train on, and a tenth that is held out.

    The tokenizer is the embedded model's, with the three tokens above. where: a file or URL, whose
    paragraphs are the documents, none of them twice, or None: stories of the project's own. Rank 0
    alone reads it. What is held out is whole batches. Raises UserError, on all ranks, for what
    cannot be read, has fewer documents, or of which a tenth is no batch.
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
        else:
            name, text = find_text(where, source, 0, run.seed)
            texts = filter(None, map(str.strip, re.split(r"\n\s*\n", text)))
        texts = list(islice(once_each(texts), count))
        if len(texts) < count:
            raise UserError(f"--text {name}: {len(texts)} different paragraphs, but "
                            f"--num-documents {count}")  # fmt: skip
        return name, tokenizer(texts, verbose=False)["input_ids"]

    name, documents = run.broadcast(run.together(load))
    if length < 3:
        raise UserError(f"--seq-len {length}: too short to compare, use 3 or more")
    held = count // 10 // batch_size * batch_size
    if not held:
        raise UserError(f"--num-documents {count}: a tenth of it, which is held out, is less than "
                        f"a batch of {batch_size}")  # fmt: skip
    run.print0(f"text: {count} documents of {name}, {held} of them held out")
    rows = (Rows(part, length, tokenizer) for part in (documents[held:], documents[:held]))
    return tokenizer, *rows


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
