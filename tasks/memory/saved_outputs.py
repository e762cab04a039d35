"""The layer backward that never runs attention again (the last line in `long_sequence.py`'s table).

Everything in a layer but attention treats tokens one by one:

    x -> norm -> q, k, v -> attention -> o -> + o_proj(o) -> + mlp(norm) -> the next layer's x

so any layer's x can be built again, tile by tile, from the embeddings and the outputs o of all
layers below, without attention. Of attention, whose time grows with the square of the length, only
the backward is run: it needs q, k and v, which are built from x, and o and the log-sum-exps of the
softmaxes (a number a token and head), which are kept. (FlashAttention-2, arXiv 2307.08691, section
3.1, has both passes.)

`long_sequence.Stack` splits a layer into tiles of tokens and rounds of heads, on one rank or many.
"""

import torch
from torch.autograd.function import once_differentiable

from utils.sequence import as_attention_takes


class SavedOutputs(torch.autograd.Function):
    """All layers and the loss. Attention is run once; of a layer only attention's outputs are kept.

                forward                                 backward, from the last layer to the first
    x           attention, then the rest, tile by tile  built again, see `rebuild`
    saved       outputs, log-sum-exps                   gradients of outputs; then of q, k, v
    loss        and d = d loss / d hidden states        d becomes the gradient before each layer

    The loss is inside so that d can be overwritten in place: a gradient from autograd may have
    other users, and a copy of it would hold one more hidden state for the whole backward.
    """

    @staticmethod
    def forward(ctx, x, stack, loss_of, *parameters):
        """x (B, S/P, H): the embeddings -> the sum of losses.

        loss_of(hidden states before the final norm) returns this sum. parameters:
        `stack.parameters`, then the parameters that loss_of trains.
        """
        ctx.stack, ctx.saved, ctx.needed = stack, Saved(x, stack.techniques.offload), []
        device_type = x.device.type
        ctx.autocast = device_type, torch.get_autocast_dtype(device_type)
        ctx.autocasts = torch.is_autocast_enabled(device_type)
        last, ctx.kept = len(stack.layers) - 1, {}
        for number, layer in enumerate(stack.layers):
            flats, lses, needed = run_attention(stack, layer, x)
            ctx.needed.append(needed)
            if 0 < number == last:  # its input is kept: its backward comes first
                ctx.kept[last] = ctx.saved.away([x])
            # Written over x itself, unless x is kept, or is the embeddings, which are autograd's.
            x = finish_all(stack, layer, x, flats, x if 0 < number < last else None)
            ctx.saved.put(flats, lses)
            del flats, lses
        with torch.enable_grad():
            hidden = x.detach().requires_grad_()
            loss = loss_of(hidden)
        wanted = [hidden, *parameters[len(stack.parameters) :]]
        d, *ctx.others = torch.autograd.grad(loss, wanted, allow_unused=True)
        # A copy of our own: a hook of the norm, say, may have kept the gradient itself. (There is
        # room: the most is held later, in the last layer's backward.)
        ctx.d = d.clone(memory_format=torch.contiguous_format)
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.saved is None:
            raise RuntimeError("a second backward: what was kept has been freed on the way")
        with torch.autocast(*ctx.autocast, enabled=ctx.autocasts):  # as the forward was
            return SavedOutputs.run_backward(ctx, grad)

    @staticmethod
    def run_backward(ctx, grad):
        stack, d = ctx.stack, ctx.d
        saved, needed, kept = ctx.saved, ctx.needed, ctx.kept
        others = [other if other is None else other * grad for other in ctx.others]
        ctx.saved = ctx.needed = ctx.kept = ctx.d = ctx.others = None
        wide = torch.promote_types(d.dtype, torch.float32)
        sums = {p: torch.zeros_like(p, dtype=wide) for p in stack.parameters}
        d.mul_(grad)  # and written over from here on
        for number in reversed(range(len(stack.layers))):
            x = rebuild(stack, number, kept, saved)
            flats, lses = saved.pop(max((at for at in kept if at < number), default=0))
            layer_backward(stack, stack.layers[number], x, flats, lses, needed.pop(), d, sums)
            del x
        return d, None, None, *(sums[p].to(p.dtype) for p in stack.parameters), *others


# ---------------------------------------------------------------- a layer, forward and backward


def qkv_of_heads(stack, layer, x, head_round):
    """Compute q, k and v of this rank's heads in a round, of all tokens, (B, heads, S, D)."""
    counts = stack.counts(head_round, keys=2)
    flat = x.new_empty(sum(stack.sizes(counts)[0]))
    views = stack.pieces(flat, counts)
    for at in stack.tiles:
        for view, piece in zip(
            views, stack.qkv_of_tokens(layer, x[:, at], at, head_round), strict=True
        ):
            view[at] = piece
    (first, stop), (key, end) = head_round[stack.rank]
    heads = stack.to_heads(flat, counts)
    return as_attention_takes(*heads.split([stop - first, end - key, end - key], dim=1))


def run_attention(stack, layer, x):
    """Run attention; return outputs (a flat tensor a round), log-sum-exps, other needs of backward.

    For a round in which this rank has no heads there are no log-sum-exps.
    """
    flats, lses, needed = [], [], []
    for head_round in stack.rounds:
        q, k, v = qkv_of_heads(stack, layer, x, head_round)
        o, *lse, rest = stack.attend(q, k, v) if q.shape[1] else (q, ())
        del q, k, v
        flats.append(stack.to_tokens([o], stack.counts(head_round)))
        lses += lse
        needed.append(rest)
    return flats, lses, needed


def finish_all(stack, layer, x, flats, into=None):
    """Run `stack.finish`, tile by tile, into a new tensor or over x itself."""
    out, pieces = torch.empty_like(x) if into is None else into, stack.in_order(flats)
    for at in stack.tiles:
        out[:, at] = stack.finish(layer, x[:, at], stack.outputs(pieces, at))
    return out


def rebuild(stack, number, kept, saved):
    """Rebuild the hidden states before a layer, from the nearest kept below it or the embeddings.

    kept: {layer: hidden states before it}. A layer whose backward is done has freed its outputs:
    that memory then holds hidden states built on the way, for layers still to come. With 8 layers,
    state 7 (before layer 7) is kept from the forward. 6 is built from 0, keeping 3 on the way; 5
    from 3, keeping 4; then 4 and 3 are there; 2 is built from 0, keeping 1. This runs 10 layers;
    building each state from the embeddings would run 28.
    """
    if number in kept:
        return saved.back(kept.pop(number))[0]
    start = max((at for at in kept if at < number), default=0)
    x, steps = saved.back(kept[start])[0] if start else stack.embeddings(), number - start
    # How many more states may be kept, and which, evenly on the way.
    free = int((len(stack.layers) - 1 - number) * stack.room) - len(kept)
    some = min(max(free, 0), steps - 1)
    keep = {start + steps * (i + 1) // (some + 1) for i in range(some)}
    for at in range(start, number):
        flats = saved.get(at, at + 1)
        x = finish_all(stack, stack.layers[at], x, flats, None if at in kept else x)
        if at + 1 in keep:
            kept[at + 1] = saved.away([x])
    return x


def layer_backward(stack, layer, x, flats, lses, needed, d, sums):
    """Turn d, the gradient after a layer, in place into the gradient before it, without `attend`.

    sums: {parameter: its gradient}, to which this adds. flats, lses, needed are freed on the way.
    """
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def gradients(outputs, inputs, grads):
        inputs_and = [*inputs, *parameters]
        found = torch.autograd.grad(outputs, inputs_and, grads, allow_unused=True)
        for parameter, grad in zip(parameters, found[len(inputs) :], strict=True):
            if grad is not None:
                sums[parameter] += grad
        return found[: len(inputs)]

    def finish_backward():
        """Return the gradients of attention's outputs; d gets what goes past attention."""
        grads = [torch.empty_like(flat) for flat in flats]
        pieces, targets = stack.in_order(flats), stack.in_order(grads)
        for at in stack.tiles:
            h, o = x[:, at].detach().requires_grad_(), stack.outputs(pieces, at).requires_grad_()
            with torch.enable_grad():
                y = stack.finish(layer, h, o)
            d[:, at], do = gradients(y, [h, o], d[:, at])
            do = do.unflatten(2, (-1, stack.D)).transpose(0, 1)
            for view, part in zip(targets, do.split([t.shape[2] for t in targets], 2), strict=True):
                view[at] = part
        return grads

    grads = finish_backward()
    for i, head_round in enumerate(stack.rounds):
        counts = stack.counts(head_round)
        q, k, v = qkv_of_heads(stack, layer, x, head_round)
        o, flats[i] = stack.to_heads(flats[i], counts), None
        do, grads[i] = stack.to_heads(grads[i], counts), None
        some = q.shape[1]  # heads of this rank
        gave = (o, lses.pop(0), needed[i]) if some else ()
        dqkv = [*stack.attend_backward(do, q, k, v, *gave)] if some else [q, k, v]
        dqkv = [one.to(x.dtype) for one in dqkv]  # as q, k and v were before autocast
        del q, k, v, o, do
        needed[i] = None
        counts = stack.counts(head_round, keys=2)
        flat = stack.to_tokens(dqkv, counts)
        views = stack.pieces(flat, counts)
        for at in stack.tiles:
            h = x[:, at].detach().requires_grad_()
            with torch.enable_grad():
                heads = stack.qkv_of_tokens(layer, h, at, head_round)
            d[:, at] += gradients(heads, [h], [view[at] for view in views])[0]


# ---------------------------------------------------------------- where it is kept


class Saved:
    """Each layer's tensors, or with `offload` their copies in pinned host memory.

    Copies run on a stream of their own, beside the kernels; one layer is fetched ahead. All device
    memory is allocated on the compute stream, which waits for copies before their memory is reused.
    So the device never holds more than a few layers, however far ahead of it the CPU is.
    """

    def __init__(self, x, offload):
        self.layers, self.coming, self.leaving = [], {}, []
        self.device = x.device
        self.stream = torch.cuda.Stream(x.device) if offload and x.is_cuda else None

    def compute(self):
        """Return the compute stream of these tensors' device, which need not be the current one."""
        return torch.cuda.current_stream(self.device)

    def away(self, tensors):
        """Return the tensors, or with `offload` host copies. Nobody may write to them any more."""
        if not self.stream:
            return tensors
        self.stream.wait_stream(self.compute())
        with torch.cuda.stream(self.stream):
            host = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for copy, tensor in zip(host, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self.leaving.append((self.stream.record_event(), tensors))
        if len(self.leaving) > 2:
            self.compute().wait_event(self.leaving.pop(0)[0])
        return host

    def back(self, host):
        """Return what `away` returned, on the device."""
        return self.arrived(self.start(host)) if self.stream else host

    def start(self, host):
        """Begin a copy to the device once those to the host are done; return (its end, tensors)."""
        for event, _ in self.leaving:
            self.compute().wait_event(event)
        self.leaving.clear()
        tensors = [torch.empty_like(t, device=self.device) for t in host]
        self.stream.wait_stream(self.compute())  # which may still use that memory
        with torch.cuda.stream(self.stream):
            for tensor, copy in zip(tensors, host, strict=True):
                tensor.copy_(copy, non_blocking=True)
        return self.stream.record_event(), tensors

    def arrived(self, coming):
        self.compute().wait_event(coming[0])
        return coming[1]

    def put(self, tensors, last):
        """Keep the next layer's tensors. last: more of them, which only `pop` returns."""
        self.layers.append(self.away([*tensors, *last]))
        self.count = len(tensors)

    def get(self, number, ahead):
        """Return a layer's tensors but for `last`; fetch layer `ahead`, which is asked for next."""
        if not self.stream:
            return self.layers[number][: self.count]
        coming = self.coming.pop(number, None) or self.start(self.layers[number][: self.count])
        tensors = self.arrived(coming)
        for other in list(self.coming):  # not asked for after all
            self.arrived(self.coming.pop(other))
        if ahead != number:
            self.coming[ahead] = self.start(self.layers[ahead][: self.count])
        return tensors

    def pop(self, ahead):
        """Return the last layer's tensors, and those put beside them as `last`; forget both."""
        tensors = self.get(len(self.layers) - 1, ahead)
        return tensors, self.back(self.layers.pop()[self.count :])
