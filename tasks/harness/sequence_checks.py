"""Checks of scripts that split a Llama's tokens: those of `model_checks.py`, and further ones.

The reference is always the unmodified model, run by rank 0 alone on the same weights and inputs.
"""

from functools import partial

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.generation import check_continuation, hf_generate
from harness.measure import measure_bytes
from harness.model_checks import error_of_mean, show_model
from harness.wider import WIDER
from utils.losses import mean_loss, token_losses
from utils.partition import shard_range
from utils.replicas import sum_gradients

PACKS = int(transformers.__version__.split(".")[0]) >= 5  # it tells documents apart by positions


def show_sequence(
    run, workload, mesh, parallelize, formula, tokens_of=None, unsplit=("",), exact=True
):
    """Call `show_model` for a model whose tokens are split over a mesh, with further checks.

    Those are of text by `.generate`, hidden states of each rank's tokens, packed documents, and
    bytes. formula(model, B, S), exact: as `measure_bytes` takes them. tokens_of(model, S): the
    tokens whose hidden states a rank has, if not those of `model.tokens(S)`. unsplit: see
    `show_model`; "" is in every name, so then a rank may have all weights in full.
    """
    run.mark, reduce = "S", partial(sum_gradients, mesh=mesh)

    def also(prompt, batch, parallel, references):
        how, new_tokens = " by .generate", workload.new_tokens
        check_continuation(run, hf_generate, prompt, new_tokens, parallel, references, how)
        ids, (B, S) = batch[0], batch[0].shape
        check_packed(run, ids, parallel, references, reduce)
        if parallel.padded(S) != S:
            run.print0(
                f"note: sequences are padded to {parallel.padded(S)} tokens: neither hidden "
                "states nor bytes are compared"
            )
            return
        tokens = parallel.tokens(S)
        local = tokens_of(parallel, S) if tokens_of else tokens
        check_hidden_states(run, batch, parallel, references, local)
        positions = torch.arange(S, device=ids.device)[None, tokens]
        inputs = ids[:, tokens], parallel.attention_mask_info(S, device=ids.device), positions
        layers, expected = run.source.config.num_hidden_layers, formula(parallel, B, S)
        measure_bytes(run, lambda: parallel.model(*inputs)[0], layers, expected, exact)

    show_model(run, workload, parallelize, unsplit=unsplit, also=also, reduce=reduce)


def check_hidden_states(run, batch, parallel, references, tokens):
    """Compare hidden states of this rank's tokens, after every layer, with the single rank's."""
    ids, mask, _ = batch
    real = mask[:, tokens, None]  # padding positions are ignored

    @torch.no_grad()
    def hidden_states(model):
        return model(ids, attention_mask=mask, output_hidden_states=True).hidden_states

    expected = run.reference_values(hidden_states, references)
    pairs = [
        (h * real, *(e[:, tokens] * real for e in es))
        for h, es in zip(hidden_states(parallel), expected, strict=True)
    ]
    run.check("hidden states of this rank's tokens", pairs)


def check_packed(run, ids, parallel, references, reduce):
    """Compare rows of several documents, whose positions restart, with the unmodified model.

    The first token of a document has no label, because nothing before it predicts it. ids: (B, S);
    reduce: see `show_model`.
    """
    B, S = ids.shape
    if S < 8:
        run.print0("note: a --seq-len below 8: packed documents are not compared")
        return
    positions, rows = torch.arange(S, device=ids.device).expand(B, -1), torch.arange(B)[:, None]
    # Even rows: documents of one token, of few, and longer ones, in each row at other places. Odd
    # rows: a document of one token, and one of all other tokens.
    starts = torch.tensor([0, 1, 3, S // 3, S // 2 + 1])
    starts = (starts + rows * (starts > 1)) * ((rows % 2 == 0) | (starts < 2))
    starts = starts.to(ids.device)[..., None]
    begins = (starts * (positions[:, None] >= starts)).amax(1)
    labels = ids.masked_fill(positions == begins, -100)
    # The last document's positions begin at S, not at 0.
    packed = dict(position_ids=positions - begins + S * (begins == starts.amax(1)), use_cache=False)
    inside = begins[:, None, :, None] == begins[:, None, None]
    blocks = inside & positions.new_ones(S, S).tril().bool()

    def step(model):
        model.zero_grad()
        if model is parallel:
            result = value = model(ids, labels=labels, **packed).loss
        else:
            own = {} if PACKS else {"attention_mask": blocks}
            result = token_losses(model(ids, **packed, **own).logits, labels)
            value = mean_loss(result, labels)
        value.backward()
        return [result.detach()]

    def only(name):  # keys, which other documents must not see; and the embeddings
        return "layers.0.self_attn.k_proj.w" in name or "embed_tokens" in name

    for reference in references[:1]:
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(only(name))
    (losses,) = run.reference_values(step, references)
    (value,) = step(parallel)
    reduce(parallel.parameters())
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    expected = [mean_loss(of_one, labels).to(value.dtype) for of_one in losses]
    run.check("packed documents: loss", [(value, *expected)], least_error=error_of_mean(*losses))
    run.check_gradients("packed documents:", parallel, references, only)
    for model in (parallel, *references):
        model.zero_grad()
    for reference in references[:1]:
        reference.requires_grad_(True)


def check_attention(run, name, attention, mesh, workload):
    """Compare causal attention of split tokens with the unmodified model's, on random q, k, v.

    attention(q, k, v, group, length=S): q (B, N, S/P, D), k and v (B, K, S/P, D) of this rank's
    tokens -> (B, N, S/P, D). This rank's outputs are compared, and its gradients of q, k, v for a
    random gradient of the outputs.
    """
    group, config = mesh.get_group(), run.source.config
    length = max(workload.seq_len, group.size())  # each rank needs a token
    # The layer's weights, on the meta device, are not needed: q, k, v are drawn.
    layer = run.source.empty_model().model.layers[0].self_attn
    local = slice(*shard_range(length, group.size(), group.rank()))
    torch.manual_seed(run.seed)
    N, K = config.num_attention_heads, config.num_key_value_heads
    *qkv, grad = (
        torch.randn(workload.batch_size, heads, length, layer.head_dim, dtype=torch.float32).to(
            run.device, run.dtype
        )
        for heads in (N, K, K, N)
    )

    def step(attend, tensors, grad):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        o = attend(*tensors)
        return o.detach(), *torch.autograd.grad(o, tensors, grad)

    def alone(dtype):
        def attend(q, k, v):
            unmodified = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
            return unmodified(layer, q, k, v, None)[0].transpose(1, 2)

        return step(attend, [t.to(dtype) for t in qkv], grad.to(dtype))

    def split(q, k, v):
        return attention(q, k, v, group, length=length)

    dtypes = [run.dtype]
    if run.dtype in WIDER:  # what the reference's own rounding is measured against
        dtypes.append(WIDER[run.dtype])
    expected = run.reference_values(alone, dtypes if run.rank == 0 else [])
    actual = step(split, [t[:, :, local] for t in qkv], grad[:, :, local])
    names = "outputs", "query grad", "key grad", "value grad"
    for what, ours, theirs in zip(names, actual, expected, strict=True):
        pair = [ours, *(t[:, :, local] for t in theirs)]
        if what == "query grad" and group.rank() == 0:
            # The first query sees one key only: its gradient is 0, but for rounding.
            pair = [t[:, :, 1:] for t in pair]
        by_token = [t.transpose(1, 2).flatten(2) for t in pair]  # all heads of a token
        run.check(f"{name}: {what}", [by_token])
