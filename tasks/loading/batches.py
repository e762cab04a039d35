"""Samples of unequal length, and each rank's own batches of them."""

import os
import signal
from collections import Counter
from itertools import chain, islice, repeat

import torch

from harness.environment import end_with_parent
from loading.architectures import refuse_length
from loading.bpe import read_tokenizer
from loading.text import load_sequences
from utils.errors import UserError


def start_worker(_):
    """Prepare a process of a DataLoader: it ends when its rank ends, however that ends."""
    end_with_parent(signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the rank may have used its threads


def batches_of(loader):
    """Yield the batches of a DataLoader; a worker's UserError comes without its traceback."""
    try:
        yield from loader
    except UserError as error:
        error.__traceback__ = None  # it would keep the loader's workers alive
        raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None


def read_samples(run, count, seq_len, where=None, tokenizer=None):
    """Return `count` pieces of a text on all ranks, 1-D tensors of seq_len / 2 to seq_len tokens.

    where: see `load_sequences`. tokenizer: see `bpe.read_tokenizer`; None is the model's. Raises
    UserError for seq_len below 3: with two tokens, some gradients are 0, and only rounding is left.
    """
    if tokenizer is not None:
        vocab_size = run.source.config.vocab_size
        run.tokenizer = run.together(lambda: read_tokenizer(tokenizer, vocab_size))
    if seq_len < 3:
        raise UserError(f"--seq-len {seq_len}: too short to compare, use 3 or more")
    refuse_length(run.source, seq_len)
    ids = load_sequences(run, where, count, seq_len).cpu()
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint(max(3, seq_len // 2), seq_len + 1, (count,), generator=generator)
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def pad(samples, size):
    """Return ids, mask and labels, (b, size) each; padding, on the right, has label -100.

    Without samples there is one row, without a label, whose mask is 1.
    """
    ids = torch.zeros(max(1, len(samples)), size, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = labels[row, : len(sample)] = sample
        mask[row, : len(sample)] = 1
    return ids, mask if samples else mask + 1, labels


class Batches:
    """This rank's batches of an epoch, on its device. All ranks have equally many.

    The last may be empty. loader: of this rank's samples. collate: makes a batch of a sample list.
    """

    def __init__(self, run, loader, collate):
        self.loader, self.device, self.nothing = loader, run.device, collate([])
        self.number = max(run.gather_objects(len(loader)))

    def __len__(self):
        return self.number

    def __iter__(self):
        for batch in islice(chain(self.loader, repeat(self.nothing)), self.number):
            yield [tensor.to(self.device) for tensor in batch]


def join(batches):
    """Return batches as one, without the rows that have no label."""
    kept = [
        [tensor[(labels != -100).any(1)] for tensor in (ids, mask, labels)]
        for ids, mask, labels in batches
    ]
    return [torch.cat(tensors) for tensors in zip(*kept, strict=True)]


def gather_batch(run, batch):
    """Return the slice of this rank's rows in the batch of all ranks, and that batch."""
    everyone = run.gather_objects([tensor.cpu() for tensor in batch])
    first, stop = (sum(map(len, join(everyone[: run.rank + i])[:1])) for i in (0, 1))
    return slice(first, stop), [tensor.to(run.device) for tensor in join(everyone)]


def check_partitions(run, data, parts, batches):
    """Check that the ranks' batches partition the data set exactly, by the samples' values.

    Check also that the parts, to train on and to validate with, share no sample of `data`.
    """
    name, taken = "samples that are missing, or dealt twice", Counter()
    for part, of_part in zip(parts, batches, strict=True):
        ids, mask, _ = join(list(of_part))
        local = [tuple(row[: n.sum()].tolist()) for row, n in zip(ids, mask, strict=True)]
        dealt = Counter(chain(*run.gather_objects(local)))
        full = Counter(tuple(sample.tolist()) for sample in part)
        taken += full
        wrong = torch.tensor(float(((full - dealt) + (dealt - full)).total()))
        run.compare(name, [(wrong, 0 * wrong)], tolerance=0.0)
    twice = taken - Counter(tuple(sample.tolist()) for sample in data)
    wrong = torch.tensor(float(twice.total()))
    run.compare(name, [(wrong, 0 * wrong)], tolerance=0.0)
    run.check(name)
