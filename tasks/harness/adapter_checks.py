"""Compare training with a single-rank run of plain PEFT: losses, gradients, parameters."""

import torch

from checkpoints.checkpoint import fingerprint
from harness.checks import category_of
from harness.model_checks import error_of_mean
from harness.tolerance import LIMITS
from utils.collectives import all_gather
from utils.llama import llama_of, trained_parameters
from utils.losses import mean_loss, token_losses


def whole_step(model, inputs):
    """Take the single rank's step, by plain PEFT's own forward. Return token losses and their mean.

    The gradients stay in the model. inputs: that forward's arguments, labels included.
    """
    kept = []

    def loss_function(logits, labels, vocab_size, **kwargs):  # see `token_losses`
        kept.append(token_losses(logits, labels))
        return mean_loss(kept[0], labels)

    llama_of(model).loss_function = loss_function
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return kept[0].detach(), loss.detach()


def expect_step(run, references, inputs):
    """Return the references' mean losses of a step, and the least error to assume for them."""
    losses, means = run.reference_values(lambda model: whole_step(model, inputs), references)
    return means, error_of_mean(*losses)


def compare_adapter_gradients(run, name_of, model, references):
    """Compare each trained parameter's gradient with the references', from their last step.

    name_of(name): the check's name for a parameter.
    """
    full = trained_parameters(references[0]) if references else {}
    for name, parameter in trained_parameters(model).items():
        grads = [full[name].grad] if references else []
        grads += [full[name].exact_grad for _ in references[1:]]
        ((*expected,),) = run.reference_values(lambda grad: [grad], grads)
        pair = parameter.grad, *expected
        run.compare(name_of(name), [pair], category=category_of(name))


def check_training(
    run, model, reference, compute, batches, optimizer_of, recomputes=None, alone=()
):
    """Check the first steps of the very training that follows. Return their losses.

    Each step starts from the parameters of a single-rank run, and its loss and gradients are
    compared with that run's. Then both optimizers get the parallel run's gradients, and must give
    the same bits. (With gradients of their own they need not: Adam divides a gradient by its size,
    so where it is nearly 0, rounding alone decides where a full step goes.)

    reference: on rank 0, the same model and adapter, unsplit. compute(model, ids): the training's
    own forward and backward. batches: (ids, inputs) of each step; inputs: the same documents, as
    the single rank's forward takes them. optimizer_of(model): makes a new optimizer, as for the
    training. recomputes: how often a step should run a layer's forward, which is counted. None: it
    is not counted, but each (name, techniques) of `alone` is checked by itself.
    """
    references, before = run.references(reference), copy_of(trained_parameters(model))
    optimizers = [optimizer_of(one) for one in (model, *references[:1])]
    calls, layer = [], llama_of(model).model.layers[0]
    counted = recomputes and not run.compiles  # a compiler decides by itself what runs again
    if counted:
        # A pre-hook: a recomputation stops early, before a forward hook would be called.
        hook = layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1.0))
    steps = [check_step(run, model, references, optimizers, compute, *batch) for batch in batches]
    if counted:
        hook.remove()
        runs = torch.tensor(calls).sum() / len(steps)
        run.print0(f"forwards of a layer in a step: {runs.item():g}, of {recomputes} expected")
        expected_runs = torch.full_like(runs, recomputes)
        run.check("forwards of a layer in a step", [(runs, expected_runs)], 0.0)
    expected, losses = map(torch.stack, zip(*steps, strict=True))
    run.show("losses", expected, losses.to(expected.dtype))
    run.check("losses")
    for category in dict.fromkeys(map(category_of, trained_parameters(model))):
        run.check(f"{category} grad")
        run.check(f"{category} after a step")
    narrow = run.dtype == torch.bfloat16
    if narrow or recomputes is None:
        once_more = expect_step(run, references, batches[0][1])
        if narrow:
            check_in_float32(run, model, compute, batches[0][0], *once_more)
        if recomputes is None:
            check_techniques(run, model, references, compute, alone, batches[0][0], *once_more)
    restore(model, before)
    return losses


def check_step(run, model, references, optimizers, compute, ids, inputs):
    """Take one step with both models from the same parameters, and compare the results.

    Returns (reference's loss, loss).
    """
    expected, least_error = expect_step(run, references, inputs)
    model.zero_grad()
    # One part for each rank's share of the sequence.
    parts = all_gather(compute(model, ids).double(), llama_of(model).get_group())
    loss = parts.new_tensor(sum(parts.tolist()))  # in the order that training adds in
    run.compare("losses", [(loss, *(x.double() for x in expected))], least_error=least_error)
    compare_adapter_gradients(run, lambda n: f"{category_of(n)} grad", model, references)
    local, full = trained_parameters(model), trained_parameters(references[0]) if references else {}
    for name, parameter in full.items():
        parameter.grad = local[name].grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in local.items():
        pair = parameter.detach(), run.broadcast(full.get(name))
        run.compare(f"{category_of(name)} after a step", [pair], tolerance=0.0)
    return expected[0], loss


def check_again(run, losses, checked, resumed, deterministic):
    """Check that the training's first steps had the losses that `check_training` returned.

    They have the same bits, except where something may have rounded otherwise: attention on a GPU
    without --deterministic, or the job that a checkpoint was resumed from, whose number of ranks
    and memory techniques may have been others.
    """
    first = checked.new_tensor(losses[: len(checked)])
    exactly = not resumed and (run.device.type == "cpu" or deterministic)
    bound = 0.0 if exactly else 2**-7 * first.abs().max().item()
    run.check("losses of the training, as checked", [(first, checked)], bound)


def check_in_float32(run, model, compute, ids, expected, least_error):
    """Check the loss once more with the same weights in float32.

    In bfloat16 a lost label may change the loss by less than rounding does. float32 rounds 2**16
    times more finely, so the tolerance here is that much smaller.
    """
    _, exact = expected
    model.zero_grad()
    narrow = [p for p in model.parameters() if p.dtype == run.dtype]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    loss = all_gather(compute(model, ids), llama_of(model).get_group()).sum(0)
    model.zero_grad()
    for parameter in narrow:
        parameter.data = parameter.data.to(run.dtype)
    units = [torch.finfo(dtype).eps for dtype in (torch.float32, run.dtype)]
    bound = 2 * LIMITS["rms"] * least_error * units[0] / units[1] + 4 * units[0] * exact.item()
    run.check("loss in float32", [(loss, exact)], bound)  # bound doubled: both values round


def check_techniques(run, model, references, compute, alone, ids, expected, least_error):
    """Check the loss and gradients with each technique alone.

    This comes after steps of training: LoRA's B is 0 at first, and so is the gradient of its A.
    """
    for name, techniques in alone:
        model.zero_grad()
        loss = compute(model, ids, techniques=techniques)
        loss = all_gather(loss, llama_of(model).get_group()).sum(0)
        run.check(
            f"{name}: loss", [(loss, *(x.to(loss) for x in expected))], least_error=least_error
        )
        check = f"{name}: gradients"
        compare_adapter_gradients(run, lambda _, check=check: check, model, references)
        run.check(check)


def copy_of(parameters):
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def restore(model, values):
    """Set the trained parameters to `values`, {name: tensor}."""
    for name, parameter in trained_parameters(model).items():
        parameter.copy_(values[name])


def check_replicas(run, parameters, when):
    """Check that what is trained is the same on all ranks. Return its SHA-256."""
    digest = fingerprint(parameters.values())
    numbers = torch.tensor(list(bytes.fromhex(digest)), device=run.device)
    run.check_same_bits(f"hash of what is trained, {when}", numbers)
    return digest
