"""Samples of unequal length, and batches of them of which each rank has its own."""

from collections import Counter
from itertools import chain, islice, repeat

import torch

from utils.text import load_sequences


def read_samples(run, count, seq_len):
    """So many pieces of text on all ranks, 1-D tensors of seq_len / 2 to seq_len tokens."""
    ids = load_sequences(run, None, count, seq_len).cpu()
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint(max(2, seq_len // 2), seq_len + 1, (count,), generator=generator)
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def pad(samples, size):
    """ids, mask and labels, (b, size) each; padding, on the right, has label -100.

    Without samples, one row that has no label.
    """
    ids = torch.zeros(max(1, len(samples)), size, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = labels[row, : len(sample)] = sample
        mask[row, : len(sample)] = 1
    return ids, mask if samples else mask + 1, labels


class Batches:
    """This rank's batches of an epoch, on its device: as many on all ranks, the last may be empty.

    loader: of this rank's samples. collate: what makes a batch of a list of samples.
    """

    def __init__(self, run, loader, collate):
        self.loader, self.device, self.nothing = loader, run.device, collate([])
        self.number = max(run.gather_objects(len(loader)))

    def __len__(self):
        return self.number

    def __iter__(self):
        for batch in islice(chain(self.loader, repeat(self.nothing)), self.number):
            yield [tensor.to(self.device) for tensor in batch]


def gather_batch(run, batch):
    """The ranks' batches as one, on all ranks, and a slice: which of its rows are this rank's."""
    rows = (batch[2] != -100).any(1)
    everyone = run.gather_objects([tensor[rows].cpu() for tensor in batch])
    first = sum(len(ids) for ids, *_ in everyone[: run.rank])
    whole = [torch.cat(tensors).to(run.device) for tensors in zip(*everyone, strict=True)]
    return slice(first, first + int(rows.sum())), whole


def check_partitions(run, data, mine):
    """The ranks' samples are those of `data`, each as often, by value; `mine` are this rank's."""
    everyone = run.gather_objects([tuple(sample.tolist()) for sample in mine])
    whole, dealt = Counter(tuple(sample.tolist()) for sample in data), Counter(chain(*everyone))
    wrong = torch.tensor(float(((whole - dealt) + (dealt - whole)).total()))
    run.check("samples that are missing, or on two ranks", [(wrong, 0 * wrong)], tolerance=0.0)
