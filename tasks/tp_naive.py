"""From a neighbouring tutorial: tensor parallelism from nothing, a product and two layers by hand.

The place to begin. In a product y = x @ w every rank holds all of x, (m, k), while w, (k, n), is
split: each of P ranks holds a part of it. There are two ways to split w.

                        by columns                       by rows
    w, on a rank        (k, n/P)                         (k/P, n)
    what it needs of x  all of it, (m, k)                its columns, (m, k/P)
    forward: x @ w is   its columns of y, (m, n/P)       a partial sum, (m, n)
        so y takes      an all-gather                    an all-reduce
    backward: dw is     (k, n/P), nothing is sent        (k/P, n), nothing is sent
    backward: dx is     a partial sum, (m, k)            its columns of dx, (m, k/P)
        so dx takes     an all-reduce                    an all-gather

An all-gather puts the parts side by side, an all-reduce adds them up; both leave the result on
every rank. What one way sends in the forward, the other sends in the backward.

Of two layers, y = fc2(fc1(x)), the first is split by columns, the second by rows. A rank's columns
of fc1's output are all that its rows of fc2 need, so nothing is sent between the layers:

    x --f--> fc1 (columns) --> fc2 (rows) --g--> y      forward:  one all-reduce, in g
                                                        backward: one all-reduce, in f

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/tp_naive.py

multiplies whole numbers, (3, 4) by (4, 6), both ways. Then it trains two layers for two iterations:
of 128 x 128 first, then --model's own, up_proj and down_proj of its first MLP as fc1 and fc2.
It prints each rank's model, output, loss and gradient of fc1, and compares them with one rank's.
(The names f and g are from Megatron-LM, arXiv 1909.08053, section 3. Next: tp_mlp.py.)
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import harness
import loading
from utils.collectives import all_reduce, gather_shares, group_of_axis
from utils.partition import shard_range
from utils.shards import keep_shard

# ---------------------------------------------------------------- a product, by columns or by rows


def share_of(size, group):
    """Return which of `size` columns or rows this rank has, [first, stop). Shares may be uneven."""
    return shard_range(size, group.size(), group.rank())


def forward_by_columns(x, w_columns, n, group):
    """Return y = x @ w, (m, n), from x (m, k) and this rank's columns of w, (k, n/P)."""
    y_columns = x @ w_columns  # (m, n/P)
    return gather_shares(y_columns, dim=1, size=n, group=group)


def backward_by_columns(dy, x, w_columns, group):
    """Compute dx (m, k) and this rank's columns of dw, given dy (m, n), the gradient of y."""
    first, stop = share_of(dy.shape[1], group)
    dy_columns = dy[:, first:stop]
    dx = all_reduce(dy_columns @ w_columns.T, group)
    dw_columns = x.T @ dy_columns  # (k, n/P)
    return dx, dw_columns


def forward_by_rows(x, w_rows, group):
    """Return y = x @ w, (m, n), from x (m, k) and this rank's rows of w, (k/P, n)."""
    first, stop = share_of(x.shape[1], group)
    x_columns = x[:, first:stop]
    return all_reduce(x_columns @ w_rows, group)


def backward_by_rows(dy, x, w_rows, group):
    """Compute dx (m, k) and this rank's rows of dw, given dy (m, n), the gradient of y."""
    first, stop = share_of(x.shape[1], group)
    x_columns = x[:, first:stop]
    dx_columns = dy @ w_rows.T  # (m, k/P)
    dx = gather_shares(dx_columns, dim=1, size=x.shape[1], group=group)
    dw_rows = x_columns.T @ dy  # (k/P, n)
    return dx, dw_rows


# ---------------------------------------------------------------- two layers


class TwoLayers(nn.Module):
    """fc2(fc1(x)), with full weights, as on one rank."""

    def __init__(self, size, hidden_size, bias=False):
        super().__init__()
        self.size, self.hidden_size = size, hidden_size
        self.fc1 = nn.Linear(size, hidden_size, bias=bias)
        self.fc2 = nn.Linear(hidden_size, size, bias=bias)

    def forward(self, x):
        """(B, size) -> (B, size)."""
        return self.fc2(self.fc1(x))


class CopyToRanks(torch.autograd.Function):
    """f: each rank uses all of x, so the gradient of x is a sum over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return all_reduce(dx, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """g: each rank has a part of the sum y, so the gradient of its part is the gradient of y."""

    @staticmethod
    def forward(ctx, y, group):
        return all_reduce(y, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class ColumnLinear(nn.Module):
    """nn.Linear(k, n) by columns: this rank computes n/P of the outputs.

    PyTorch keeps w transposed, as weight (n, k): the columns of w are rows of the weight.
    """

    def __init__(self, linear, group):
        super().__init__()
        first, stop = share_of(linear.out_features, group)
        keep_shard(linear, 0, first, stop)
        self.weight = linear.weight  # (n/P, k)
        self.bias = linear.bias  # (n/P) or None: each output has its own
        self.group = group

    def forward(self, x):
        """(B, k) -> (B, n/P)."""
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)

    def extra_repr(self):
        return f"in_features={self.weight.shape[1]}, out_features={len(self.weight)} on this rank"


class RowLinear(nn.Module):
    """nn.Linear(k, n) by rows: this rank uses k/P of the inputs."""

    def __init__(self, linear, group):
        super().__init__()
        first, stop = share_of(linear.in_features, group)
        keep_shard(linear, 1, first, stop)
        self.weight = linear.weight  # (n, k/P)
        self.bias = linear.bias  # (n) or None, on every rank
        self.group = group

    def forward(self, x):
        """(B, k/P) -> (B, n)."""
        y = SumOverRanks.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # after the sum, so that it is added once

    def extra_repr(self):
        return f"in_features={self.weight.shape[1]} on this rank, out_features={len(self.weight)}"


def split_two_layers(model, group):
    """Split TwoLayers in place. All ranks of `group` call this, and each keeps its slices."""
    model.fc1 = ColumnLinear(model.fc1, group)
    model.fc2 = RowLinear(model.fc2, group)
    return model


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = harness.make_parser(__doc__)
    add = parser.add_argument
    add(
        "--batch-size", type=harness.positive, default=4, help="inputs of the two layers; default 4"
    )
    add("--iterations", type=harness.positive, default=2, help="of training; default 2")
    add("--lr", type=harness.rate, default=0.1, help="learning rate of SGD; default 0.1")
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Show the product, and then the training of two layers: random layers, and --model's."""
    group = group_of_axis(run.mesh("tp"))
    name = run.source.name  # before anything is shown, raises for a --model that cannot be used
    run.print_in_order(f"rank={run.rank}, world_size={run.world_size}")
    show_product(run, group)
    for title, make in ("128 x 128", random_layers), (name, layers_of_model):
        model = run.together(partial(make, run, partial(split_two_layers, group=group)))
        reference = make(run) if run.rank == 0 else None
        show_training(run, title, reference, model, args)


def show_product(run, group):
    """Multiply (3, 4) by (4, 6), whole numbers in float32, so that nothing is rounded."""
    x = torch.arange(12.0, device=run.device).view(3, 4)
    w = torch.arange(24.0, device=run.device).view(4, 6)
    dy = torch.arange(18.0, device=run.device).view(3, 6) % 5 - 2
    y, dx, dw = x @ w, dy @ w.T, x.T @ dy
    run.print0(f"--- x @ w of one rank: {y.long().tolist()}")

    first, stop = share_of(6, group)
    w_columns = w[:, first:stop]
    y_by_columns = forward_by_columns(x, w_columns, 6, group)
    dx_by_columns, dw_columns = backward_by_columns(dy, x, w_columns, group)
    run.print_in_order(f"by columns (rank={run.rank}): {(x @ w_columns).long().tolist()}")
    run.check("product by columns: y", [(y_by_columns, y)], tolerance=0.0)
    run.check("product by columns: dx", [(dx_by_columns, dx)], tolerance=0.0)
    run.check("product by columns: dw", [(dw_columns, dw[:, first:stop])], tolerance=0.0)

    first, stop = share_of(4, group)
    w_rows = w[first:stop]
    y_by_rows = forward_by_rows(x, w_rows, group)
    dx_by_rows, dw_rows = backward_by_rows(dy, x, w_rows, group)
    run.print_in_order(f"by rows (rank={run.rank}): {(x[:, first:stop] @ w_rows).long().tolist()}")
    run.check("product by rows: y", [(y_by_rows, y)], tolerance=0.0)
    run.check("product by rows: dx", [(dx_by_rows, dx)], tolerance=0.0)
    run.check("product by rows: dw", [(dw_rows, dw[first:stop])], tolerance=0.0)


def random_layers(run, split=None):
    """Return two layers of 128 x 128, drawn from the seed: before the split alike on all ranks."""
    torch.manual_seed(run.seed)
    layers = TwoLayers(128, 128)
    return run.place(split(layers) if split else layers)


def layers_of_model(run, split=None):
    """Return up_proj and down_proj of the model's first MLP as fc1 and fc2, with their biases."""
    config = run.source.config
    with torch.device("meta"):
        layers = TwoLayers(config.hidden_size, config.intermediate_size, config.mlp_bias)
    if split:
        split(layers)

    def read(name, shard):
        name = name.replace("fc1", "up_proj").replace("fc2", "down_proj")
        return run.source.read(f"model.layers.0.mlp.{name}", shard)

    return loading.materialize(layers, read, run.dtype, run.device)


def train_step(model, x, target):
    """Run a forward and backward; return outputs, x's gradient, squared errors, (B, size) each.

    The loss is the mean of the squared errors. Each parameter's gradient is in its .grad.
    """
    model.zero_grad()
    dtype = model.fc1.weight.dtype
    x = x.to(dtype, copy=True).requires_grad_()
    y = model(x)
    errors = (y - target.to(dtype)).square()
    errors.mean().backward()
    return y.detach(), x.grad, errors.detach()


def show_training(run, title, reference, model, args):
    """Train by SGD on one batch; compare with the reference (rank 0's; elsewhere None)."""
    references = run.references(reference)
    run.print0(f"--- two layers, {title}")
    run.print0(f"model of one rank: {reference}")
    run.print_in_order(f"model (rank={run.rank}): {model}")
    run.check_weights(title, model, references, unsplit=())
    run.longest_sum = max(model.size, model.hidden_size)  # nothing here sums over a vocabulary
    torch.manual_seed(run.seed + 1)  # x and target: alike on every rank, but unlike the weights
    x, target = torch.randn(2, args.batch_size, model.size, dtype=torch.float32)
    x, target = x.to(run.device, run.dtype), target.to(run.device, run.dtype)
    for number in range(args.iterations):
        expected = run.reference_values(lambda layers: train_step(layers, x, target), references)
        actual = train_step(model, x, target)
        compare(run, f"{title}, iteration {number}", model, references, actual, expected, args.lr)
        for trained in (model, *references[:1]):
            torch.optim.SGD(trained.parameters(), args.lr).step()
    if model.fc2.bias is not None:
        run.check_same_bits(f"{title}: fc2.bias, same bits on all ranks", model.fc2.bias)


def compare(run, title, model, references, actual, expected, lr):
    """Print what each rank has after an iteration, and check it.

    actual: the three tensors that train_step returned; expected: for each, the references' values.
    """
    (y, x_grad, errors), (expected_y, expected_x_grad, expected_errors) = actual, expected
    loss, expected_losses = errors.mean(), [one.mean() for one in expected_errors]
    harness.refuse_not_finite(torch.stack(expected_losses), lr)
    expected_grad = run.broadcast(references[0].fc1.weight.grad if references else None)
    first, stop = share_of(len(expected_grad), model.fc1.group)
    run.print0(f"--- {title}")
    run.show("outputs", expected_y[0], y)
    run.show_texts("loss", f"{expected_losses[0]:.6f}", f"{loss:.6f}")
    part = f"{harness.brief(model.fc1.weight.grad)}, rows {first} to {stop - 1}"
    run.show_texts("fc1_grad", harness.brief(expected_grad), part)
    run.show("input grad", expected_x_grad[0], x_grad)
    run.check(f"{title}: outputs", [(y, *expected_y)])
    # The reference's loss may be nearly exact by chance: so ours may be off by the rms rounding
    # error of the squared errors, whose mean it is.
    least_error = harness.error_of_mean(*expected_errors)
    run.check(f"{title}: loss", [(loss, *expected_losses)], least_error=least_error)
    run.check(f"{title}: input grad", [(x_grad, *expected_x_grad)])
    run.check_gradients(f"{title}:", model, references)


if __name__ == "__main__":
    main()
