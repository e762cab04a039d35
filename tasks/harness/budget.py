"""Training with a strategy of data parallelism where each rank has only so much memory."""

from contextlib import contextmanager

import torch

from harness.measure import is_for_memory, limited_memory
from harness.model_checks import error_of_mean
from utils.errors import UserError
from utils.families import layers_of
from utils.losses import token_losses


@contextmanager
def limited_to_budget(run, strategy, budget):
    """Limit the memory to a budget, see `limited_memory`; the error's line names the strategy."""
    run.print0(
        f"{strategy}: {budget / 2**30:.2f} GiB for weights, gradients, Adam's states and "
        "activations of each rank"
    )
    try:
        with limited_memory(run.device, budget):
            yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_for_memory(error):
            raise
        raise UserError(
            f"out of memory: {strategy} does not train {run.source.name} with {budget / 2**30:.2f} "
            f"GiB on each of {run.world_size} rank(s); take more ranks, or more --memory-budget"
        ) from None


def warm_up_adam(run):
    """Take a step of Adam on one number, so that no budget counts what a first step imports."""
    number = torch.nn.Parameter(torch.zeros(1, device=run.device))
    number.grad = torch.zeros_like(number)
    torch.optim.AdamW([number]).step()


@torch.no_grad()
def error_of_loss(run, batch):
    """Return the error of the reference's mean loss of the full batch, see `error_of_mean`."""
    ids, mask, labels = batch

    def losses(model):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return [token_losses(logits, labels)]

    return error_of_mean(*run.reference_values(losses, run.references(run.load_reference()))[0])


def numbers_at_peak(run, by_layer):
    """Return how many numbers a rank of P holds at most in a step of few tokens with FSDP2.

    The model has W parameters and L layers. The shards of weights and of Adam's two states are
    3 W / P. In the backward a unit holds its full gradients, and a copy as the reduce-scatter's
    input; finished units keep only a shard. The root unit, all that is in no layer, is full from
    the forward on. The peak beyond the shards is the larger of these (head: its gradient's size):

        4 layers + root + head + (L - 2) layers / P     a layer, when the next one is gathered
        2 roots + (W - root) / P                        the root, at the end

    If the model is one unit, it is the root: 3 W / P + 2 W. At the end the larger of two terms is
    added: on a CPU, a copy of those of the root's gradients whose rows do not divide by P; with a
    tied head, twice the head, as its gradient is kept beside the embedding's.
    """
    P, model = run.world_size, run.source.empty_model()
    layers = layers_of(model) if by_layer else []
    inside = {id(p) for layer in layers for p in layer.parameters()}
    parameters = dict.fromkeys(model.parameters())
    of_root = [p for p in parameters if id(p) not in inside]
    W, root = (sum(p.numel() for p in some) for some in (parameters, of_root))
    head = model.lm_head.weight.numel()
    tied = run.source.config.tie_word_embeddings
    once_more = [p.numel() for p in of_root if p.shape[0] % P and run.device.type == "cpu"]
    moments = [2 * root + (W - root) / P + max(sum(once_more), 2 * head * tied)]
    if layers:
        layer = sum(p.numel() for p in layers[0].parameters())
        moments.append(4 * layer + root + head + max(0, len(layers) - 2) * layer / P)
    return 3 * W / P + max(moments)
