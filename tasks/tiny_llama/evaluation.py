"""Measure the tiny model on text that it was not trained on, and let it speak."""

import math
from itertools import islice

import corpus
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaForCausalLM

HELD_OUT_SEED = 1_000_003  # is added to the seed of the training text

GREEDY = {"bos_token_id": 0, "do_sample": False, "eos_token_id": 0, "pad_token_id": 1}

FOX = "A quick brown fox"
PROMPTS = [
    FOX,
    "Once upon a time there was a little hedgehog named Clara",
    "Wanda and the old clockmaker",
    "Emil lost his golden lantern at the",
    "It was the first Sunday in April, and",
    "On Monday, Hana and her uncle saw",
    '"Where have you hidden it?" asked Otto',
    "What colour is the old cart? The",
    "There are nine mushrooms in the cup",
    "Dear Leila, last night I had",
    "It was raining, and Noah",
    "Three ducks and a goose",
]


def next_token_loss(model: LlamaForCausalLM, tokens: torch.Tensor, **options) -> torch.Tensor:
    """Return the cross-entropy of every token given those before it in its window."""
    logits = model(tokens[:, :-1], use_cache=False).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), **options)


@torch.inference_mode()
def perplexity(
    model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str], length: int
) -> dict:
    """Measure held-out text in windows of `length` tokens (the last, shorter one is dropped)."""
    tokens = [0]
    for encoding in tokenizer.encode_batch(texts):
        tokens += [*encoding.ids, 0]
    length = min(length, len(tokens) - 1)
    starts = range(0, len(tokens) - length, length)
    windows = torch.tensor([tokens[start : start + length + 1] for start in starts])
    total = sum(next_token_loss(model, batch, reduction="sum").item() for batch in windows.split(2))
    read = windows[:, 1:].flatten().tolist()
    num_bytes = len(tokenizer.decode(read, skip_special_tokens=True).encode()) + read.count(0)
    return {
        "window": length,
        "tokens": len(read),
        "loss": round(total / len(read), 4),
        "perplexity": round(math.exp(total / len(read)), 3),
        "bits_per_byte": round(total / math.log(2) / num_bytes, 4),
    }


@torch.inference_mode()
def continue_greedily(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, steps: int = 60
) -> tuple[str, list[float]]:
    """Return the likeliest continuation, and by how much each logit exceeds the second largest."""
    start = torch.tensor([tokenizer.encode(prompt).ids])
    config = GenerationConfig(
        **GREEDY,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    out = model.generate(start, attention_mask=torch.ones_like(start), generation_config=config)
    best = torch.cat(out.logits).topk(2).values
    margins = [round(margin, 2) for margin in (best[:, 0] - best[:, 1]).tolist()]
    return tokenizer.decode(out.sequences[0, start.shape[1] :].tolist()), margins


def evaluate(
    model: LlamaForCausalLM, tokenizer: Tokenizer, seen: dict[str, int], seed: int
) -> dict:
    """Return (and print) perplexities of held-out text, and what follows the prompts."""
    stories = list(islice(corpus.stories(seed + HELD_OUT_SEED), 500))
    results = {"held_out": {}, "greedy": []}
    for name, texts in ("stories", stories), ("prose", corpus.prose(held_out=True)):
        for length in (256, 2048):
            result = perplexity(model, tokenizer, texts, length)
            results["held_out"][f"{name}_{length}"] = result
            print(f"held-out {name}: {result}")
    for prompt in PROMPTS:
        words, margins = continue_greedily(model, tokenizer, prompt)
        results["greedy"].append(
            {"prompt": prompt, "seen_in_training": seen[prompt], "greedy": words}
        )
        if prompt == FOX:
            results["fox_logit_margins"] = margins[:10]
            print(f"logit margins after {prompt!r}: {margins[:10]}")
        print(f"{prompt} >>>{words}")
    return results
