"""How training is held against a single-rank run of plain PEFT: losses, gradients, parameters."""

from functools import partial

import torch
import torch.nn.functional as F

from checkpoint import fingerprint
from long_sequence import Techniques, possible
from utils import all_gather, kind_of

# What is checked by itself: backward, tiled_loss, tiled_mlp, head_groups, offload.
ALONE = {
    "layers taken apart": ("plain", False, False, False),
    "tiled loss alone": ("plain", True, False, False),
    "tiled MLP alone": ("plain", False, True, False),
    "head groups alone": ("plain", False, False, True),
    "checkpointing alone": ("checkpoint", False, False, False),
    "saved outputs alone": ("saved-outputs", False, False, False),
    "saved outputs in host memory": ("saved-outputs", False, False, False, True),  # of a GPU's
    "checkpointing and tiles": ("checkpoint", True, True, True),
    "all together": ("saved-outputs", True, True, True),
}


def base_of(model):
    """The LlamaForCausalLM, which may be under PEFT."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def trained(model):
    """{name: parameter} of what is trained."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_optimizer(run, model):
    return torch.optim.Adam(trained(model).values(), run.args.lr)


# ---------------------------------------------------------------- the checks


def follow(run, model, forward_backward, batches, steps, lead=None):
    """Some steps of training: the losses, then of each step all gradients, and what is trained.

    lead: what a reference returned. After each step its parameters are taken, so that each step is
    compared from the same start: where a gradient is next to nothing, Adam, which divides it by its
    own size, makes a whole step of its rounding.
    """
    optimizer, parameters = make_optimizer(run, model), list(trained(model).values())
    losses, values = [], []
    for i in range(steps):
        optimizer.zero_grad()
        losses.append(forward_backward(model, batches(i)))
        values += [p.grad.clone() for p in parameters]
        optimizer.step()
        values += [p.detach().clone() for p in parameters]
        for at, parameter in enumerate(parameters if lead else []):
            parameter.data.copy_(lead[1 + len(values) - len(parameters) + at][0])
    return [torch.stack(losses), *values]


def whole_step(model, ids):
    """The single rank's: the gradients, and the loss, that PEFT and Hugging Face make of labels."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def next_token_loss(logits, labels, vocab_size, **kwargs):
    """Hugging Face's loss, which is float32 even in float64, without that."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def check_training(run, model, reference, forward_backward, batches, recomputes=None):
    """The first steps of the very training that follows, beside a single-rank run's: the losses.

    reference: on rank 0, the same model and adapter, whole. forward_backward(model, ids): the very
    function that trains. recomputes: how often a layer should run in a step, where it is counted.
    """
    steps, names = min(run.args.check_steps, run.args.steps), list(trained(model))
    if run.rank == 0 and run.dtype == torch.float64:
        base_of(reference).loss_function = next_token_loss
    references = run.references(reference)
    before = {name: p.detach().clone() for name, p in trained(model).items()}

    expected = run.expect(lambda m: follow(run, m, whole_step, batches, steps), references)
    calls = []
    layer = base_of(model).model.layers[0]  # a hook before, since recomputing stops early
    hook = layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1.0))
    actual = follow(run, model, forward_backward, batches, steps, expected)
    hook.remove()
    if recomputes:
        runs = torch.tensor(calls).sum() / steps
        run.say(f"forwards of a layer in a step: {runs.item():g}, of {recomputes} expected")
        expected_runs = torch.full_like(runs, recomputes)
        run.check("forwards of a layer in a step", [(runs, expected_runs)], 0.0)
    actual[0] = all_gather(actual[0], run.group).sum(0)
    run.show("Reference losses", expected[0][0], ranks="0")
    run.show("SParallel losses", actual[0])
    run.check("losses", [(actual[0], *expected[0])])

    count, layers = len(names), run.source.config.num_hidden_layers
    kinds = {}
    for at, name in enumerate(names):
        kinds.setdefault(kind_of(name), []).append(at)
    for kind, members in kinds.items():
        grads = [[1 + 2 * step * count + at for step in range(steps)] for at in members]
        pairs = [(actual[i], *expected[i]) for of_one in grads for i in of_one]
        run.check(f"{kind} grad", pairs, layers=layers)
        pairs, bound = [], None
        for of_one in grads:
            sizes = [expected[i][0].abs() for i in of_one]
            clear = torch.stack([size >= 0.1 * size.max() for size in sizes]).all(0)
            for i in of_one:
                values, others = actual[i + count], expected[i + count]
                if run.dtype == torch.bfloat16:
                    # A gradient above a tenth of the largest may be off by a good part of itself.
                    # (A step that is not taken, or goes the other way, is --lr or more.)
                    values, others = torch.where(clear, values, others[0]), others[:1]
                    rounding = 2**-7 * values.abs().max().item()
                    bound = max(bound or 0, 0.5 * run.args.lr + rounding)
                elif run.dtype == torch.float32:
                    # As in `follow`. Where gradients are above a tenth of the largest, they may be
                    # off by 10 times their tolerance, and so may Adam's two means of them and the
                    # step, of --lr; and each step rounds.
                    values = torch.where(clear, values, others[0])
                    rounding = 2**-23 * values.abs().max().item()
                    bound = max(bound or 0, 2e-4 * layers * run.args.lr + rounding)
                elif run.dtype == torch.float64:
                    # Where a gradient is near Adam's eps, 1e-8, its rounding is 1e-8 of a step.
                    largest = others[0].abs().max().item()
                    bound = max(bound or 0, 1e-10 * largest, 1e-8 * run.args.lr)
                pairs.append((values, *others))
        run.check(f"{kind} after a step", pairs, bound)
    if recomputes is None:
        check_techniques(run, model, references, forward_backward, batches, layers)
    restore(model, before)
    return actual[0]


def check_techniques(run, model, references, forward_backward, batches, layers):
    """Each technique alone: loss and gradients after the steps before (at first LoRA's are 0)."""
    expected = run.expect(lambda m: follow(run, m, whole_step, batches, 1), references)
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    for name, flags in ALONE.items():
        techniques = Techniques(*flags, tile_tokens=7)
        if techniques.offload and run.device.type != "cuda":
            continue
        if why := possible(base_of(model), techniques)[1]:
            run.say(f"note: {name}: not checked, {why}")
            continue
        alone = partial(forward_backward, techniques=techniques)
        actual = follow(run, model, alone, batches, 1)
        restore(model, before)
        actual[0] = all_gather(actual[0], run.group).sum(0)
        run.check(f"{name}: loss", [(actual[0], *expected[0])])
        pairs = [(actual[i], *expected[i]) for i in range(1, 1 + len(before))]
        run.check(f"{name}: gradients", pairs, layers=layers)


@torch.no_grad()
def restore(model, values):
    """Set what is trained to values, {name: tensor}."""
    for name, parameter in trained(model).items():
        parameter.copy_(values[name])


def check_replicas(run, parameters, when):
    """The trained parameters are the same on all ranks, by their SHA-256, which is returned."""
    digest = fingerprint(parameters.values())
    numbers = torch.tensor(list(bytes.fromhex(digest)), device=run.device)
    run.check_same_bits(f"hash of what is trained, {when}", numbers)
    return digest
