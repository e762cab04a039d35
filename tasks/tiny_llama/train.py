"""Make the tiny Llama model of this folder: text, tokenizer, training, evaluation, files.

    python tasks/tiny_llama/train.py --output-dir /tmp/tiny

About 1.76 million parameters are trained for some twelve minutes on two processor cores. The
sizes of the model are all different from one another on purpose, so that a mistaken shape in code
that splits it cannot pass unseen. Everything is seeded: building it again on one machine gave the
same bits; another machine's may differ by rounding.
"""

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import corpus
import tokenizers
import torch
import transformers
from evaluation import GREEDY, PROMPTS, evaluate, next_token_loss
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from windows import Windows, copies

PAD = "<|pad|>"
SPECIAL_TOKENS = [corpus.END_OF_TEXT, PAD]  # ids 0 and 1
VOCAB_SIZE = 1531  # a prime, so that no number of ranks divides it

# Spelled the way that both transformers 4 and 5 read.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 160,
    "initializer_range": 0.08,
    "intermediate_size": 440,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
TOKENIZER_CONFIG = {
    "bos_token": corpus.END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "eos_token": corpus.END_OF_TEXT,
    "model_input_names": ["input_ids", "attention_mask"],  # generate() takes no other
    "model_max_length": CONFIG["max_position_embeddings"],
    "pad_token": PAD,
    "padding_side": "left",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


BATCH_TOKENS = 2048  # of a step, in windows of SHORT tokens, in some steps of LONG tokens
SHORT, LONG = 256, CONFIG["max_position_embeddings"]
LONG_EVERY = 6  # one step of so many has long windows, early on too: late steps learn little
LEARNING_RATE, WARM_UP = 4e-3, 200
COPY_STEPS = 600  # so many first steps also practise copying, in half of their short windows


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text comes back from its tokens unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = [*islice(corpus.stories(seed), 5000), *corpus.prose() * 5]
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


@torch.no_grad()
def start_copying(model: LlamaForCausalLM) -> None:
    """Set the heads' first weights so that they attend to like words, and copy them.

    The output weights are the value weights transposed: as embeddings are tied, a word that is
    attended to becomes likelier. Half of the query heads have the weights of their keys.
    """
    kv_heads, heads = CONFIG["num_key_value_heads"], CONFIG["num_attention_heads"]
    shape = kv_heads, CONFIG["head_dim"], CONFIG["hidden_size"]
    for layer in model.model.layers:
        attention = layer.self_attn
        keys, values = attention.k_proj.weight.view(shape), attention.v_proj.weight.view(shape)
        repeated = values.repeat_interleave(heads // kv_heads, dim=0)
        attention.o_proj.weight.copy_(repeated.flatten(0, 1).T)
        attention.q_proj.weight.view(kv_heads, heads // kv_heads, *shape[1:])[:, 0] = keys


def train(model: LlamaForCausalLM, windows: Windows, steps: int, dtype: torch.dtype) -> None:
    """Train with AdamW: a cosine to zero, times a warm-up."""
    # Decay would draw the embeddings of all names together: nothing but chance tells them apart.
    linear = [m.weight for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    others = [weight for weight in model.parameters() if not any(weight is w for w in linear)]
    groups = [{"params": linear, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    bar, average = tqdm(range(steps), desc="train", unit="step", mininterval=2.0), None
    for step in bar:
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * decay
        length = LONG if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
        tokens = windows.batch(BATCH_TOKENS // length, length)
        if step < COPY_STEPS:
            half = len(tokens) // 2
            tokens[:half] = copies(half, length + 1, range(len(SPECIAL_TOKENS), VOCAB_SIZE))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = next_token_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average = loss.item() if average is None else 0.99 * average + 0.01 * loss.item()
        bar.set_postfix(loss=f"{average:.3f}", refresh=False)


def save(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, evaluation: dict) -> None:
    """Write the whole model directory to `folder`."""
    model.save_pretrained(folder)  # for the weights; the configurations are ours
    (folder / "model.safetensors").chmod(0o644)  # some versions write it for the owner only
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", GREEDY),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("evaluation.json", evaluation),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path(__file__).resolve().parent,
        help="the folder to write; files of an earlier model there are replaced at the very end",
    )
    parser.add_argument(
        "--steps", type=int, default=3900, help=f"training steps, of {BATCH_TOKENS} tokens each"
    )
    parser.add_argument(
        "--seed", type=int, default=1337, help="decides the text and the first weights"
    )
    parser.add_argument("--threads", type=int, default=2, help="processor threads to use")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of matrix products in training; saved weights are always float32",
    )
    args = parser.parse_args()
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=args.output_dir))
    except OSError as error:
        print(f"error: cannot write to {args.output_dir}: {error.strerror}", file=sys.stderr)
        sys.exit(2)

    try:
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        start = time.monotonic()
        tokenizer = train_tokenizer(args.seed)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        start_copying(model)
        print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters():,} parameters")
        windows = Windows(tokenizer, args.seed, PROMPTS)
        train(model, windows, args.steps, getattr(torch, args.dtype))
        seconds = round(time.monotonic() - start)
        evaluation = {
            "parameters": model.num_parameters(),
            "steps": args.steps,
            "tokens_trained": args.steps * BATCH_TOKENS,
            "seconds": seconds,
            "cores": os.cpu_count(),
            "threads": args.threads,
            "seed": args.seed,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
        evaluation |= evaluate(model.eval(), tokenizer, windows.seen, args.seed)
        save(temporary, model, tokenizer, evaluation)
        for file in temporary.iterdir():
            os.replace(file, args.output_dir / file.name)
        print(f"wrote {args.output_dir} after {seconds} s of training")
    except KeyboardInterrupt:
        sys.exit("stopped: nothing was written")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
