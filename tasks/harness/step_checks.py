"""Compare a training step of a full batch, and three of them, with a single-rank run's."""

import copy
from collections import Counter
from functools import partial
from itertools import chain

import torch
from torch.optim import SGD

from checkpoints.checkpoint import fingerprint
from harness.checks import HIDES
from harness.model_checks import compared_layers, error_of_mean, model_step, number_of_parameters
from harness.wider import WIDER, wider_copy
from utils.errors import UserError
from utils.gradients import local_part
from utils.losses import mean_loss, token_losses
from utils.shards import shard_of

ALL = slice(None)
LARGE = 500e6  # parameters; beyond, the copies that take three steps fill the memory


class Reference:
    """What the single rank makes of a batch.

    On all ranks there are `logits` (B, S, V), 0 where a token is padding, `input_grad` (B, S, H),
    the gradient of the embeddings, and the mean `loss`. Each of these has a value for every
    reference, see `checks.Comparison.references`. On rank 0 there are `models`, with their
    gradients, and `trained`: a copy after three steps, with the parameters' changes as gradients.
    """

    def __init__(self, run, batch):
        ids, mask, labels = batch

        def from_loss(model, inputs):
            logits = model(**inputs).logits
            return blank(logits, mask), mean_loss(token_losses(logits, labels), labels)

        def step(model):
            return model_step(model, ids, mask, from_loss)

        self.models, self.trained = run.references(run.load_reference()), []
        self.only, self.mask = compared_layers(run), mask
        self.compares_changes = compares_changes(run)
        if not self.compares_changes:
            run.print0(
                "note: what three steps change is compared only up to "
                f"{LARGE / 1e6:.0f} M parameters, and not in bfloat16"
            )
        for model in self.models[:1]:
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(self.only(key))  # what is not compared takes no memory
        self.logits, self.input_grad = run.reference_values(step, self.models)
        losses = [token_losses(logits, labels) for logits in self.logits]
        self.loss = [mean_loss(one, labels) for one in losses]
        self.least_error = error_of_mean(*losses)
        for model in self.models[:1] if self.compares_changes else ():
            copies = [copy.deepcopy(model), *(wider_copy(model) for _ in self.models[1:])]
            for one in copies:
                three_steps(list(one.requires_grad_().parameters()), partial(step, one))
            for parameter, *exact in zip(*(one.parameters() for one in copies), strict=True):
                parameter.exact_grad = exact[0].grad.float() if exact else None
            self.trained = copies[:1]

    def check_step(self, run, name, module, step, embedding, rows=ALL, times=1, optimizer=SGD):
        """Compare a step with the reference: logits, loss, gradients, and what three steps change.

        step(): forward and backward; returns this rank's part of the loss, and the logits of the
        batch or None. embedding: the module that embeds the batch, or None; the gradients of its
        outputs, one microbatch after the other, are compared. rows: those of the batch that this
        rank has. times: the loss is multiplied by it before the backward. optimizer: see
        `three_steps`. Afterwards the parameters are as they were before.
        """
        seen, parameters = [], [parameter for _, parameter in module.named_parameters()]
        mask, number = self.mask[rows], len(self.mask[rows])

        def keep(module, args, y):
            if y.requires_grad:
                y.retain_grad()
                seen.append(y)

        hook = embedding.register_forward_hook(keep) if embedding else None
        loss, logits = step()
        if hook:
            hook.remove()
        logits = None if logits is None or not number else logits[:number]
        pairs = [] if logits is None else [(blank(logits, mask), *(x[rows] for x in self.logits))]
        end = 0, int(self.mask[0].nonzero()[-1])
        first = number > 0 and not rows.start  # whether this rank has the row that is shown
        local = logits[end] if first and logits is not None else None
        run.show("outputs", self.logits[0][end], local)
        run.check(f"{name}: logits", pairs)
        loss = sum_of_parts(run, loss).to(self.loss[0].dtype)
        run.show("loss", self.loss[0], loss)
        run.check(f"{name}: loss", [(loss, *self.loss)], least_error=self.least_error)
        pieces, grad = [], None
        while seen and sum(map(len, pieces)) < number:  # earlier outputs: of shape inference
            y = seen.pop()
            pieces.insert(0, torch.zeros_like(y) if y.grad is None else y.grad / times)
            grad = torch.cat(pieces)
        pairs = [] if grad is None else [(grad, *(x[rows] for x in self.input_grad))]
        local = grad[0] if first and grad is not None else None
        run.show("input grad", self.input_grad[0][0], local)
        run.check(f"{name}: input embeddings grad", pairs)
        self.compare_gradients(run, name, module)
        before = three_steps(parameters, step, optimizer)
        if self.compares_changes:
            compare_gradients(run, f"{name}: changes by 3 steps", module, self.trained)
        check_copies(run, f"{name}: copies of a parameter, after 3 steps", module)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
                parameter.grad = None

    def compare_gradients(self, run, name, module):
        """Compare the gradients of a module with those of the full batch on the single rank."""
        title = f"{name}: gradients"
        compare_gradients(run, title, module, self.models, self.only)


def compares_changes(run):
    """Return whether what steps change is compared.

    It is not in bfloat16, which has no digits for small changes, nor of large models.
    """
    return number_of_parameters(run.source) <= LARGE and run.dtype != torch.bfloat16


def sum_of_parts(run, loss):
    """Sum all ranks' parts of a loss, each a tensor or a number, in float64."""
    return run.gather(torch.as_tensor(loss, dtype=torch.float64, device=run.device)).sum()


def check_copies(run, title, module, value=lambda parameter: parameter):
    """Check that all ranks' copies of a parameter, or its gradient, are the same bits, by SHA-256.

    value(parameter): the tensor to compare.
    """
    local = {(key, str(shard_of(p))): p for key, p in module.named_parameters()}
    everyone = run.gather_objects(list(local))
    copied = [part for part, times in Counter(chain(*everyone)).items() if times > 1]
    hashes = run.gather_objects(
        [(part, fingerprint([local_part(value(local[part]))])) for part in copied if part in local]
    )
    if copied:
        # How many hashes there are beyond one for each copied region.
        more = torch.tensor(float(len(set(chain(*hashes))) - len(copied)))
        run.check(title, [(more, 0 * more)], 0.0)


def blank(logits, mask):
    """Set logits to 0 where a token is padding: what they are there differs by implementation."""
    return logits.masked_fill(mask[..., None] == 0, 0)


def compare_gradients(run, name, module, references, only=lambda name: True):
    """Compare the gradients of all parameters whose name only(name) wants, in one check."""
    values = [lambda parameter: parameter.grad]
    if run.dtype in WIDER:
        values.append(lambda parameter: parameter.exact_grad)
    for category, pairs in run.slices(module, references, only, *values).items():
        run.compare(name, pairs, category=category)
    run.check(name)


def three_steps(parameters, step, optimizer=SGD):
    """Take three steps of SGD with momentum. Replace each gradient by what they have changed.

    step(): fills in the gradients. optimizer(parameters, lr, momentum): SGD, split or not. Returns
    what the parameters were before.
    """
    optimizer = optimizer(parameters, lr=0.01, momentum=0.9)

    def train():
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()

    return keep_changes(parameters, train)[0]


def keep_changes(parameters, train):
    """Call train(), and replace each parameter's gradient by what it has changed.

    Returns what the parameters were before, and what train() has returned.
    """
    before = [parameter.detach().clone() for parameter in parameters]
    result = train()
    for parameter, old in zip(parameters, before, strict=True):
        parameter.grad = parameter.detach() - old
    return before, result


def refuse_not_finite(losses, lr):
    """Raise UserError for losses or norms that are not finite. All ranks have the same ones."""
    if not losses.isfinite().all():
        raise UserError(f"--lr {lr}: a loss or a norm is not finite: take a smaller one")


def refuse_rounding(run, results, lr):
    """Raise UserError, on all ranks, if rounding alone changes a result too much to compare others.

    results: for each, the tensors of the reference and of the wider one; on rank 0. One alone, in
    float64, is not looked at.
    """
    shares = [off_by(*both) for both in results if len(both) > 1]
    share = run.broadcast(max(shares, default=0.0))
    if share > HIDES:
        raise UserError(
            f"--lr {lr}: rounding alone changes the training by {share:.0%}: take a smaller one"
        )


def off_by(values, exact):
    """Return how far tensors are off, as a share of the exact ones: by their common norms."""
    differences = [(one - other).norm() for one, other in zip(values, exact, strict=True)]
    sizes = [one.norm() for one in exact]
    return (torch.stack(differences).norm() / torch.stack(sizes).norm()).item()
