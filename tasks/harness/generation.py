"""Continue a text, and compare the continuation with the reference's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GenerationConfig

from utils.errors import UserError

# KEPT: a model's own settings for generation that `hf_generate` keeps. HARMLESS: those that would
# change none of its tokens.
KEPT = "eos_token_id", "use_cache"
HARMLESS = {
    *KEPT, "bos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p",
    "max_length", "max_new_tokens", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "_from_model_config", "transformers_version",
}  # fmt: skip


def encode_prompts(run, prompts, new_tokens):
    """Return the tokens of each --prompt, padded on the left, and their mask: (B, S) both."""
    source, tokenizer, rows = run.source, run.tokenizer, []
    if left_out := other_settings(source.generation):
        run.print0(
            f"note: text is greedy: {', '.join(left_out)} of {source.name}'s generation settings "
            "are left out"
        )
    limit = source.config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        tokens = [i % source.config.vocab_size for i in range(1, 6 + number)]
        if tokenizer:
            tokens = tokens_of(tokenizer, prompt, "--prompt")
        if not tokens or not prompt.strip():
            raise UserError("--prompt is empty: give at least one word")
        if len(tokens) + new_tokens > limit:
            raise UserError(
                f"--prompt has {len(tokens)} tokens and --new-tokens adds "
                f"{new_tokens}, but {source.name} takes {limit}"
            )
        if not tokenizer:
            run.print0(f"note: {source.name} has no tokenizer: a prompt is tokens {tokens}")
        rows.append(torch.tensor(tokens, device=run.device))
    length = max(len(row) for row in rows)
    # Any token will do as padding: the mask hides it.
    without = tokenizer and "pad_token" not in tokenizer.special_tokens_map
    if without and any(len(row) < length for row in rows):
        run.print0(f"note: {source.name} has no pad token: prompts are padded with token 0, masked")
    ids = torch.stack([F.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.stack([F.pad(row * 0 + 1, (length - len(row), 0)) for row in rows])
    return ids, mask


def tokens_of(tokenizer, text, flag):
    """Return the tokens of the text that a flag gives, a list."""
    try:
        return tokenizer(text)["input_ids"]
    except (TypeError, UnicodeError):
        raise UserError(f"{flag} {text!r}: not valid Unicode") from None


def other_settings(settings):
    """Return the names of a GenerationConfig's settings that could change the likeliest tokens.

    Settings of sampling alone, such as top_k, do not count. settings: may be None.
    """
    found = settings.to_diff_dict() if settings else {}
    return sorted(name for name, value in found.items() if value and name not in HARMLESS)


@torch.no_grad()
def recompute(model, ids, new_tokens):
    """Continue ids (B, S) greedily, all recomputed for each token. Return (B, S + new_tokens)."""
    for _ in range(new_tokens):
        token = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], dim=1)
    return ids


def hf_generate(model, ids, new_tokens, **options):
    """Continue ids (B, S) greedily by Hugging Face's own loop: return (B, S + new_tokens).

    The loop uses its cache. It stops early when every sequence has ended; what is missing then is
    filled with -1. Of the model's own settings only those in `KEPT` count. Others need a
    tokenizer, a clock or another model, or choose tokens that are not the likeliest: there
    `check_text` could not tell a tie from an error.
    """
    length, own = ids.shape[1] + new_tokens, model.generation_config
    options = {"attention_mask": torch.ones_like(ids), **options}
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **{name: getattr(own, name) for name in KEPT},
    )
    model.generation_config = settings  # else the library would add the model's to these
    try:
        ids = model.generate(ids, generation_config=settings, **options)
    finally:
        model.generation_config = own
    return F.pad(ids, (0, length - ids.shape[1]), value=-1)


def check_continuation(run, generate, prompt, new_tokens, parallel, references, how=""):
    """Check that generate(model, prompt, new_tokens) continues a prompt as on the single rank.

    prompt: (1, S). how: said in the check's name.
    """
    tokens, mask = generate(parallel, prompt, new_tokens), torch.ones_like(prompt)
    ((expected,),) = run.reference_values(
        lambda m: [generate(m, prompt, new_tokens)], references[:1]
    )
    check_text(run, tokens, expected, references, mask, how)


def goes_on(new, source):
    """Return whether a token follows an end token of the model's settings. new: (B, tokens)."""
    ends = (source.generation or source.config).eos_token_id
    ends = [] if ends is None else torch.tensor(ends, device=new.device).flatten()
    return any((new[:, :-1] == end)[new[:, 1:] >= 0].any() for end in ends)


def check_text(run, tokens, expected, references, mask, how="", show=True):
    """Compare continuations, (B, tokens) both, this rank's and the reference's; print if `show`.

    mask: of the prompts, (B, S). how: said in the check's name.
    """

    def text(ids):
        if not run.tokenizer:
            return ids.tolist()
        rows = (row[len(m) - m.sum() :] for row, m in zip(ids, mask, strict=True))
        return " ".join(repr(run.tokenizer.decode(row[row >= 0])) for row in rows)

    name, apart = f"generated tokens{how}", torch.tensor(float(not torch.equal(tokens, expected)))
    dist.all_reduce(apart := apart.to(run.device))
    if show or apart:
        run.show_texts("text", text(expected), text(tokens))
    if show and goes_on(tokens[:, mask.shape[1] :], run.source):
        run.print0(
            "note: text runs past the model's end token: a fixed number of tokens is compared"
        )
    if run.dtype == torch.float64 or not apart:
        run.check(name, [(tokens, expected)], tolerance=0.0)
        return
    # Where a text first differs from the reference's, rounding must have decided between the two
    # tokens. So their exact logits may differ by 4 times the reference's largest error there: each
    # may be off by twice that error.
    run.check_same_bits(f"{name}, same on all ranks", tokens)
    for row in (tokens != expected).any(dim=1).nonzero().flatten().tolist():
        at = (tokens[row] != expected[row]).nonzero()[0].item()
        ids, seen = expected[:, :at], F.pad(mask, (0, at - mask.shape[1]), value=1)

        def there(model, ids=ids, seen=seen, row=row):
            return [model(ids, attention_mask=seen).logits[row, -1]]

        ((logits, exact),) = run.reference_values(there, references)
        own = (logits - exact).abs().max().item()
        pair = exact[tokens[row, at]], exact[expected[row, at]]
        run.check(f"{name}, two as likely at token {at}", [pair], 4 * own)
