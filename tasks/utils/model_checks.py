"""What every script that parallelizes a whole Llama shows: the same checks, text, time and memory.

The reference is always the unmodified model, run by rank 0 alone on the same weights and inputs.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from utils.errors import UserError
from utils.generation import check_continuation, encode_prompts, recompute
from utils.measure import measure_memory, measure_time
from utils.shards import shard_of
from utils.tolerance import LIMITS
from utils.wider import wider_copy

TEXT = """The model reads these lines to be checked on something like language. A river does not
hurry; it arrives all the same. Anna counted the boats on the water, seven in the morning and four
in the evening, and wondered where the other three had gone. "They will be back on Sunday," said
her father, who had once been a sailor and knew the habits of boats. """


def own_loss(model, labels, **inputs):
    """The mean loss as the model has it."""
    return model(**inputs, labels=labels).loss


def show_model(run, parallelize, loss=own_loss, whole=("norm",), also=None, reduce=None):
    """Check --model, continue the prompt with it, and measure it.

    parallelize(model): shards a LlamaForCausalLM in place. loss(model, labels, **inputs): the
    parallel model's mean loss. whole: words in the names of the parameters that are not split.
    also(tokenizer, prompt, batch, parallel, references): further checks, before the measurements.
    reduce(tensors): what the gradients of parameters and inputs need after a backward, if anything.
    """
    args, source = run.args, run.source
    tokenizer = run.together(source.tokenizer)
    prompt, _ = encode_prompts(run, source, tokenizer)
    batch = make_batch(run, source, tokenizer)
    reference = source.load_model(run.dtype, run.device) if run.rank == 0 else None
    references = run.references(reference)
    parallel = run.together(lambda: source.load_model(run.dtype, run.device, parallelize))
    run.check_weights("all", parallel, references, whole=whole)
    check_model(run, source, parallel, references, batch, loss, reduce)
    generate = partial(recompute, ids=prompt, new_tokens=args.new_tokens)
    check_continuation(run, tokenizer, generate, prompt, parallel, references)
    if also:
        also(tokenizer, prompt, batch, parallel, references)
    del references
    if args.repeats != 0:
        measure_time(run, reference, parallel, batch[0], reduce)
        del reference, parallel
        measure_memory(run, source, parallelize, batch[0], reduce)


def make_batch(run, source, tokenizer, text=TEXT):
    """ids, attention mask, labels, (B, S) each: of the text, or random without a tokenizer.

    The last of several sequences is a third shorter and padded on the left, where only the mask
    keeps the padding from being attended to.
    """
    if run.args.seq_len < 3:  # of two tokens, some gradients are 0: there is nothing but rounding
        raise UserError(f"--seq-len {run.args.seq_len}: too short to compare, use 3 or more")
    if run.args.seq_len > source.config.max_position_embeddings:
        run.print0(f"note: --seq-len {run.args.seq_len} is more than {source.name} was made for, "
                   f"{source.config.max_position_embeddings}")  # fmt: skip
    ids = torch.randint(source.config.vocab_size, (run.args.batch_size, run.args.seq_len))
    if tokenizer:
        words = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        ids = words.repeat(-(-ids.numel() // len(words)))[: ids.numel()].view_as(ids)
    mask = torch.ones_like(ids)
    if len(ids) > 1:
        mask[-1, : ids.shape[1] // 3] = 0
    seen = mask * F.pad(mask, (1, -1), value=1)  # no token is predicted from padding, either
    return tuple(run.broadcast(t) for t in (ids, mask, ids.masked_fill(seen == 0, -100)))


def token_losses(logits, labels):
    """Next-token losses of logits (B, S, V), (B, S - 1), in float32 at least; 0 for labels of -100.

    Not by PyTorch's cross-entropy: of 49,152 logits in float32, on a CPU, it alone is off by more
    than the whole model before it; and so would be all the gradients of the reference.
    """
    logits, labels = logits[:, :-1], labels[:, 1:]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != -100
    chosen = logits.gather(-1, labels.masked_fill(~valid, 0)[..., None])[..., 0]
    return (logits.logsumexp(-1) - chosen).masked_fill(~valid, 0)


def plain_loss(model, labels, **inputs):
    """The unmodified model's mean loss."""
    return mean_loss(token_losses(model(**inputs).logits, labels), labels)


def error_of_mean(losses, exact=None):
    """What the mean of a reference's token losses is off by at least, as `Run.check` takes it.

    A mean is off by less than what it is of, in rms, which does not hang on chance as a single
    number does. So the rms may be a few times larger, and the mean's error as large as the rms.
    """
    if exact is None:
        return 0.0
    valid = exact != 0
    return (losses - exact)[valid].square().mean().sqrt().item() / LIMITS["rms"]


@torch.no_grad()
def expect_loss(run, references, ids):
    """The references' mean losses of ids (B, S), and what their own error is at least."""
    (losses,) = run.expect(lambda model: [token_losses(model(ids).logits, ids)], references)
    return [mean_loss(of_one, ids) for of_one in losses], error_of_mean(*losses)


def mean_loss(losses, labels):
    """Of `token_losses`: their mean over all labels that are not -100."""
    return losses.sum() / (labels[:, 1:] != -100).sum()


def embed(model, ids, mask):
    """A model's inputs, from its own embeddings on."""
    return dict(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)


def model_step(model, ids, mask, function, reduce=None):
    """Forward and backward of function(model, inputs) -> (a result, the scalar to go back from).

    reduce: see `show_model`. Returns the result and the gradient of the input embeddings,
    (B, S, H). The gradients of the weights stay in the model.
    """
    model.zero_grad()
    inputs = embed(model, ids, mask)
    inputs["inputs_embeds"].retain_grad()
    result, scalar = function(model, inputs)
    scalar.backward()
    if reduce:
        reduce([*model.parameters(), inputs["inputs_embeds"]])
    return result.detach(), inputs["inputs_embeds"].grad


def check_model(run, source, parallel, references, batch, loss, reduce):
    """Compare embeddings, logits, loss, and all gradients with the single-rank run's.

    Gradients come from the loss, and from a random gradient of the logits.
    """
    ids, mask, labels = batch
    torch.manual_seed(run.args.seed)
    upstream = torch.randn(*ids.shape, source.config.vocab_size, dtype=torch.float32)
    upstream = upstream.to(run.device)
    last = source.config.num_hidden_layers - 1
    large = sum(math.prod(shape) for shape in source.shapes.values()) > 100e6
    some = [f"layers.{i}." for i in (0, last // 2, last)]
    if large:
        run.print0(
            f"note: a large model: the gradients of layers 0, {last // 2} and {last} stand for all"
        )

    # The edges of all shards of the vocabulary, again and again.
    rows = shard_of(parallel.get_input_embeddings().weight)[0]
    mine = torch.tensor([rows.start, max(rows.start, rows.stop - 1)], device=ids.device)
    edges = run.gather(mine).flatten().repeat(ids.numel())[: ids.numel()].view_as(ids)

    def only(name):  # of a large model, the first, middle and last layer's
        return not large or "layers." not in name or any(part in name for part in some)

    for reference in references[:1]:
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(only(name))  # what is not compared takes no memory

    def from_logits(model, inputs):
        logits = model(**inputs).logits.masked_fill(mask[..., None] == 0, 0)
        return logits, (logits * upstream).sum()

    def from_loss(model, inputs):
        if model is parallel:
            value = loss(model, labels, **inputs)
            return value, value
        losses = token_losses(model(**inputs).logits, labels)
        return losses, mean_loss(losses, labels)

    with torch.no_grad():
        # Other padding, the same logits behind it: it is not attended to.
        other = torch.where(mask == 0, (ids + 1) % source.config.vocab_size, ids)
        pair = [parallel(**embed(parallel, i, mask)).logits[mask == 1] for i in (other, ids)]
        run.check("logits, whatever the padding", [pair], tolerance=0.0)
        for tokens in ids, edges:
            (expected,) = run.expect(lambda m, t=tokens: [m.get_input_embeddings()(t)], references)
            actual = parallel.get_input_embeddings()(tokens)
            run.compare("embeddings", [(actual, expected[0])], tolerance=0.0)  # copied: exact
        run.check("embeddings")

    for name, function in ("logits", from_logits), ("loss", from_loss):
        expected, expected_grad = run.expect(
            lambda model, function=function: model_step(model, ids, mask, function), references
        )
        actual, grad = model_step(parallel, ids, mask, function, reduce)
        own = 0.0
        if name == "logits":
            logits, shown, where = actual, "outputs", (0, -1)
        else:
            shown, where, own = "loss", (), error_of_mean(*expected)
            actual = actual.to(torch.promote_types(actual.dtype, torch.float32))
            expected = [mean_loss(losses, labels).to(actual.dtype) for losses in expected]
        run.show(f"Reference {shown}", expected[0][where], ranks="0")
        run.show(f"{run.mark}Parallel {shown}", actual[where])
        run.show("Reference input grad", expected_grad[0][0], ranks="0")
        run.show(f"{run.mark}Parallel input grad", grad[0])
        run.check(name, [(actual, *expected)], own=own)
        run.check_same_bits(f"{name}, same bits on all ranks", actual)
        run.check(f"{name}: input embeddings grad", [(grad, *expected_grad)])
        run.check_gradients(f"{name}:", parallel, references, only, tokens=(labels != -100).sum())
        norms = [p.grad for n, p in parallel.named_parameters() if "norm" in n]
        run.check_same_bits(f"{name}: norm grads, same bits on all ranks", torch.cat(norms))
        del norms
        for model in (parallel, *references):
            model.zero_grad()  # gradients may be most of the memory

    # Beside a reference that is off itself, above all in bfloat16, a loss that is taken the wrong
    # way might pass. Of the run's own logits it must be right but for its own rounding. And so it
    # must with labels at the edges of all shards, which the text may lack.
    rare = edges.masked_fill(labels == -100, -100)
    with torch.no_grad():
        of_rare = loss(parallel, rare, **embed(parallel, ids, mask)).to(actual.dtype)
    for value, targets in (actual, labels), (of_rare, rare):
        of_logits = mean_loss(token_losses(logits.double(), targets), targets).to(actual.dtype)
        largest = max(logits.abs().max().item(), of_logits.item())
        rounding = 4 * torch.finfo(actual.dtype).eps * largest
        run.compare("loss, of its own logits", [(value, of_logits)], rounding)
    run.check("loss, of its own logits")
    for reference in references[:1]:
        reference.requires_grad_(True)


def overfit(model, loss, batch, steps):
    """Train on one batch: the loss of each step."""
    ids, mask, labels = batch
    # foreach kernels take DTensors or ordinary tensors, not both. The large eps keeps Adam from
    # blowing up gradients that are nothing but rounding; wide models need small steps.
    lr = 0.5 / model.config.hidden_size
    optimizer = torch.optim.Adam(model.parameters(), lr, eps=1e-5, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, labels, input_ids=ids, attention_mask=mask)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def check_overfitting(run, parallel, references, batch, steps):
    """Train both models on one batch: the same curve, which ends near zero."""
    curve = overfit(parallel, own_loss, batch, steps)
    if references[1:]:  # which has the weights of the first, which are trained here
        references = [references[0], wider_copy(references[0])]
    (expected,) = run.expect(lambda m: [overfit(m, plain_loss, batch, steps)], references)
    run.show("Reference losses", expected[0], ranks="0")
    run.show(f"{run.mark}Parallel losses", curve)
    run.check("losses while overfitting", [(curve, *expected)])
    run.results |= {"losses": curve.tolist(), "reference_losses": expected[0].tolist()}
    left = curve[-1:] / curve[0]
    run.check("last loss, below 1 % of the first", [(left, 0 * left)], tolerance=0.01)
