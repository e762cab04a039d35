"""What Tasks 2 to 4, the ring and tp_ulysses.py show: the same checks, text, time and memory.

The reference is always the unmodified model, run by rank 0 alone on the same weights and inputs.
"""

import math

import torch
import torch.nn.functional as F

from harness.generation import check_continuation, encode_prompts, recompute
from harness.measure import measure_memory, measure_time
from harness.tolerance import LIMITS
from harness.wider import wider_copy
from loading.architectures import refuse_length
from utils.errors import UserError
from utils.losses import mean_loss, token_losses
from utils.shards import shard_of

TEXT = """The model reads these lines to be checked on something like language. A river does not
hurry; it arrives all the same. Anna counted the boats on the water, seven in the morning and four
in the evening, and wondered where the other three had gone. "They will be back on Sunday," said
her father, who had once been a sailor and knew the habits of boats. """


def own_loss(model, labels, **inputs):
    """Return the mean loss as the model itself has it."""
    return model(**inputs, labels=labels).loss


def show_model(
    run, workload, parallelize, loss=own_loss, unsplit=("norm",), also=None, reduce=None
):
    """Check --model, continue the prompt with it, and measure it.

    workload: a `flags.Workload`. parallelize(model): shards a LlamaForCausalLM in place.
    loss(model, labels, **inputs): the parallel model's mean loss. unsplit: words in the names of
    the parameters that are not split. also(prompt, batch, parallel, references): further checks,
    before the measurements. reduce(tensors): sums gradients over the ranks after a backward, of
    parameters and inputs; None: the technique has done so.
    """
    prompt, _ = encode_prompts(run, [workload.prompt], workload.new_tokens)
    batch = make_batch(run, workload.batch_size, workload.seq_len)
    reference = run.load_reference()
    references = run.references(reference)
    parallel = run.together(lambda: run.load_model(parallelize))
    run.check_weights("all", parallel, references, unsplit=unsplit)
    check_model(run, parallel, references, batch, loss, reduce)
    check_continuation(run, recompute, prompt, workload.new_tokens, parallel, references)
    if also:
        also(prompt, batch, parallel, references)
    del references
    if workload.repeats != 0:
        measure_time(run, reference, parallel, batch[0], workload.repeats, reduce)
        del reference, parallel
        measure_memory(run, parallelize, batch[0], reduce)


def make_batch(run, batch_size, seq_len, text=TEXT):
    """Return ids, attention mask, labels, (B, S) each: of the text, or random without a tokenizer.

    The last of several sequences is a third shorter and padded on the left, where only the mask
    keeps the padding from being attended to.
    """
    config = run.source.config
    if seq_len < 3:  # with two tokens, some gradients are 0: only rounding is left
        raise UserError(f"--seq-len {seq_len}: too short to compare, use 3 or more")
    refuse_length(run.source, seq_len)
    if seq_len > config.max_position_embeddings:
        run.print0(
            f"note: --seq-len {seq_len} is more than {run.source.name} was made for, "
            f"{config.max_position_embeddings}"
        )
    ids = torch.randint(config.vocab_size, (batch_size, seq_len))
    if run.tokenizer:
        tokens = torch.tensor(run.tokenizer(text, verbose=False)["input_ids"])
        ids = tokens.repeat(-(-ids.numel() // len(tokens)))[: ids.numel()].view_as(ids)
    mask = torch.ones_like(ids)
    if len(ids) > 1:
        mask[-1, : ids.shape[1] // 3] = 0
    seen = mask * F.pad(mask, (1, -1), value=1)  # no token is predicted from padding, either
    return tuple(run.broadcast(t) for t in (ids, mask, ids.masked_fill(seen == 0, -100)))


def plain_loss(model, labels, **inputs):
    """Return the unmodified model's mean loss."""
    return mean_loss(token_losses(model(**inputs).logits, labels), labels)


def error_of_mean(losses, exact=None):
    """Return the least error to assume for a reference's mean loss: `Run.check`'s least_error.

    A mean's error is below the rms error of its terms, here the token losses. That rms depends less
    on chance than the error of one number. So this is the rms divided by LIMITS["rms"], by which
    `tolerance.judge` multiplies: a run's mean may be as far off as the rms.
    """
    if exact is None:
        return 0.0
    valid = exact != 0
    return (losses - exact)[valid].square().mean().sqrt().item() / LIMITS["rms"]


@torch.no_grad()
def expect_loss(run, references, ids):
    """Return the references' mean losses of ids (B, S), and the least error to assume for them."""
    (losses,) = run.reference_values(
        lambda model: [token_losses(model(ids).logits, ids)], references
    )
    return [mean_loss(of_one, ids) for of_one in losses], error_of_mean(*losses)


def embed(model, ids, mask):
    """Return a model's inputs, with ids embedded by its own embeddings."""
    return dict(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)


def model_step(model, ids, mask, function, reduce=None):
    """Run the forward and backward of function(model, inputs) -> (result, scalar to go back from).

    reduce: see `show_model`. Returns the result and the gradient of the input embeddings, (B, S,
    H). The gradients of the weights stay in the model.
    """
    model.zero_grad()
    inputs = embed(model, ids, mask)
    inputs["inputs_embeds"].retain_grad()
    result, scalar = function(model, inputs)
    scalar.backward()
    if reduce:
        reduce([*model.parameters(), inputs["inputs_embeds"]])
    return result.detach(), inputs["inputs_embeds"].grad


def check_model(run, parallel, references, batch, loss=own_loss, reduce=None):
    """Compare embeddings, logits, loss, and all gradients with the single-rank run's.

    Gradients come from the loss, and from a random gradient of the logits. loss, reduce: see
    `show_model`.
    """
    ids, mask, labels = batch
    torch.manual_seed(run.seed)
    upstream = torch.randn(*ids.shape, run.source.config.vocab_size, dtype=torch.float32)
    upstream, only = upstream.to(run.device), compared_layers(run)
    for reference in references[:1]:
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(only(name))  # what is not compared takes no memory
    edges = shard_edges(run, parallel, ids)
    check_inputs(run, parallel, references, batch, edges)

    def from_logits(model, inputs):
        logits = model(**inputs).logits.masked_fill(mask[..., None] == 0, 0)
        return logits, (logits * upstream).sum()

    def from_loss(model, inputs):
        if model is parallel:
            value = loss(model, labels, **inputs)
            return value, value
        losses = token_losses(model(**inputs).logits, labels)
        return losses, mean_loss(losses, labels)

    def step(function):
        """Return (this rank's, *expected) of `model_step`'s result, and of the input gradient."""
        expected = run.reference_values(
            lambda model: model_step(model, ids, mask, function), references
        )
        actual = model_step(parallel, ids, mask, function, reduce)
        return [(a, *e) for a, e in zip(actual, expected, strict=True)]

    def compare(name, shown_as, results, grads, where=(), least_error=0.0):
        """Check a step, and show some of it. where: the part of the results to show."""
        run.show(shown_as, results[1][where], results[0][where])
        run.show("input grad", grads[1][0], grads[0][0])
        run.check(name, [results], least_error=least_error)
        run.check_same_bits(f"{name}, same bits on all ranks", results[0])
        run.check(f"{name}: input embeddings grad", [grads])
        run.check_gradients(f"{name}:", parallel, references, only)
        norms = [p.grad for n, p in parallel.named_parameters() if "norm" in n]
        run.check_same_bits(f"{name}: norm grads, same bits on all ranks", torch.cat(norms))
        for model in (parallel, *references):
            model.zero_grad()  # gradients may be most of the memory

    logits, grads = step(from_logits)
    compare("logits", "outputs", logits, grads, where=(0, -1))
    (value, *losses), grads = step(from_loss)
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    expected = [mean_loss(of_one, labels).to(value.dtype) for of_one in losses]
    compare("loss", "loss", (value, *expected), grads, least_error=error_of_mean(*losses))
    check_own_loss(run, parallel, batch, edges, logits[0], value, loss)
    for reference in references[:1]:
        reference.requires_grad_(True)


def number_of_parameters(source):
    return sum(math.prod(shape) for shape in source.shapes.values())


def compared_layers(run):
    """Return a function of a parameter's name: whether its gradient is compared.

    In a large model only some layers' gradients are.
    """
    last = run.source.config.num_hidden_layers - 1
    if number_of_parameters(run.source) <= 100e6:
        return lambda name: True
    run.print0(
        f"note: a large model: the gradients of layers 0, {last // 2} and {last} stand for all"
    )
    layers = f".{run.source.family.layers}."
    some = [f"{layers}{i}." for i in (0, last // 2, last)]
    return lambda name: layers not in name or any(part in name for part in some)


def shard_edges(run, parallel, ids):
    """Return the edges of all ranks' shards of the vocabulary, repeated to the shape of ids."""
    rows = shard_of(parallel.get_input_embeddings().weight)[0]
    local = torch.tensor([rows.start, max(rows.start, rows.stop - 1)], device=ids.device)
    return run.gather(local).flatten().repeat(ids.numel())[: ids.numel()].view_as(ids)


@torch.no_grad()
def check_inputs(run, parallel, references, batch, edges):
    """Check that padding is not attended to, and that embeddings are the full model's rows."""
    ids, mask, _ = batch
    if (mask == 0).any():
        # Other tokens as padding must not change the logits of the tokens after it.
        other = torch.where(mask == 0, (ids + 1) % run.source.config.vocab_size, ids)
        pair = [parallel(**embed(parallel, i, mask)).logits[mask == 1] for i in (other, ids)]
        run.check("logits, whatever the padding", [pair], tolerance=0.0)
    for tokens in ids, edges:
        (expected,) = run.reference_values(
            lambda m, t=tokens: [m.get_input_embeddings()(t)], references
        )
        actual = parallel.get_input_embeddings()(tokens)
        run.compare("embeddings", [(actual, expected[0])], tolerance=0.0)  # copies are exact
    run.check("embeddings")


@torch.no_grad()
def check_own_loss(run, parallel, batch, edges, logits, value, loss):
    """Compare the loss with the loss of the run's own logits; only the loss's rounding may differ.

    Against a reference with errors of its own, above all in bfloat16, a wrongly computed loss might
    pass. Labels at the edges of all vocabulary shards, which the text may lack, are checked, too.
    """
    ids, mask, labels = batch
    if run.compiles:  # the graph with gradients may round otherwise
        logits = parallel(**embed(parallel, ids, mask)).logits
        value = loss(parallel, labels, **embed(parallel, ids, mask)).to(value.dtype)
    rare = edges.masked_fill(labels == -100, -100)
    of_rare = loss(parallel, rare, **embed(parallel, ids, mask)).to(value.dtype)
    for actual, targets in (value, labels), (of_rare, rare):
        of_logits = mean_loss(token_losses(logits.double(), targets), targets).to(actual.dtype)
        largest = max(logits.abs().max().item(), of_logits.item())
        rounding = 4 * torch.finfo(actual.dtype).eps * largest
        run.compare("loss, of its own logits", [(actual, of_logits)], rounding)
    run.check("loss, of its own logits")


def train_on_batch(model, loss, batch, optimizer, steps):
    """Train on one batch. Return the loss before each step, (steps,). loss: see `show_model`."""
    ids, mask, labels = batch
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, labels, input_ids=ids, attention_mask=mask)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def overfit(model, loss, batch, steps):
    """Train on one batch by Adam. Return the losses, as `train_on_batch`."""
    # foreach kernels take DTensors or ordinary tensors, not both. The large eps keeps Adam from
    # blowing up gradients that are nothing but rounding; wide models need small steps.
    lr = 0.5 / model.config.hidden_size
    optimizer = torch.optim.Adam(model.parameters(), lr, eps=1e-5, foreach=False)
    return train_on_batch(model, loss, batch, optimizer, steps)


def check_overfitting(run, parallel, references, batch, steps):
    """Train both models on one batch: check that the curves agree, and end near zero."""
    curve = overfit(parallel, own_loss, batch, steps)
    if references[1:]:  # it shares the first one's weights, which training changes
        references = [references[0], wider_copy(references[0])]
    (expected,) = run.reference_values(lambda m: [overfit(m, plain_loss, batch, steps)], references)
    run.show("losses", expected[0], curve)
    run.check("losses while overfitting", [(curve, *expected)])
    run.results |= {"losses": curve.tolist(), "reference_losses": expected[0].tolist()}
    left = curve[-1:] / curve[0]
    run.check("last loss, below 1 % of the first", [(left, 0 * left)], tolerance=0.01)
