"""The training text as windows of tokens, and the windows that teach the model to copy."""

import sys
from collections.abc import Iterator
from itertools import islice

import corpus
import torch
from tokenizers import Tokenizer

PROSE_EVERY = 50  # one document of so many is a paragraph of prose


def documents(seed: int) -> Iterator[str]:
    """Yield the training text: stories without end, and the prose again and again among them."""
    stories, prose = corpus.stories(seed), corpus.prose()
    for number in range(sys.maxsize):
        if number % PROSE_EVERY == PROSE_EVERY - 1:
            yield prose[number // PROSE_EVERY % len(prose)]
        else:
            yield next(stories)


class Windows:
    """Windows of tokens, cut from documents, each followed by an end-of-text token.

    Every other window begins with a document, because that is what a prompt looks like to the
    model: words with nothing to the left of them. `seen` counts the documents that hold a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, prompts: list[str]):
        self.tokenizer, self.texts = tokenizer, documents(seed)
        self.tokens, self.number, self.seen = [], 0, dict.fromkeys(prompts, 0)

    def next(self, length: int) -> list[int]:
        """Return `length` tokens and the one that follows them."""
        while len(self.tokens) <= length:
            texts = list(islice(self.texts, 64))
            for prompt in self.seen:
                self.seen[prompt] += sum(prompt in text for text in texts)
            for encoding in self.tokenizer.encode_batch(texts):
                self.tokens += [*encoding.ids, 0]
        window = self.tokens[: length + 1]
        self.number += 1
        self.tokens = self.tokens[length:]
        if self.number % 2 and 0 in self.tokens:
            self.tokens = self.tokens[self.tokens.index(0) + 1 :]
        return window

    def batch(self, count: int, length: int) -> torch.Tensor:
        """Return `count` windows."""
        return torch.tensor([self.next(length) for _ in range(count)])


def copies(count: int, length: int, tokens: range) -> torch.Tensor:
    """Return windows in which a few random tokens come again and again, in any order.

    A model soon learns from them to look back for what it has read before. Without them it takes
    very long until it calls the people of a story by the same names all the way through.
    """
    few = torch.randint(tokens.start, tokens.stop, (count, int(torch.randint(2, 16, ()))))
    return few.gather(1, torch.randint(few.shape[1], (count, length)))
