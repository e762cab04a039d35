"""What scripts that split a Llama's tokens show: as `model_checks.py` has it, and further checks.

The reference is always the unmodified model, run by rank 0 alone on the same weights and inputs.
"""

from functools import partial

import torch
import transformers

from utils.collectives import sum_gradients
from utils.generation import check_continuation, hf_generate
from utils.measure import measure_bytes
from utils.model_checks import error_of_mean, mean_loss, model_step, show_model, token_losses

PACKS = int(transformers.__version__.split(".")[0]) >= 5  # by itself, where positions restart


def show_sequence(run, workload, mesh, parallelize, formula, held=None, whole=("",)):
    """`show_model`, of a model whose tokens are split over a mesh's ranks, and further checks.

    That is text by `.generate`, hidden states of each rank's tokens, packed documents, and bytes.
    formula(model, B, S): those of a layer, as `measure_bytes` takes it. held(model, S): the tokens
    whose hidden states a rank has, if not of `model.tokens(S)`. whole: see `show_model`; with "",
    which is in every name, no weight is split.
    """
    run.mark, reduce = "S", partial(sum_gradients, mesh=mesh)

    def also(prompt, batch, parallel, references):
        how, new_tokens = " by .generate", workload.new_tokens
        check_continuation(run, hf_generate, prompt, new_tokens, parallel, references, how)
        ids, (B, S) = batch[0], batch[0].shape
        if parallel.padded(S) != S:
            return
        tokens = parallel.tokens(S)
        mine = held(parallel, S) if held else tokens
        check_hidden_states(run, batch, parallel, references, mine)
        check_packed(run, ids, parallel, references, reduce)
        positions = torch.arange(S, device=ids.device)[None, tokens]
        inputs = ids[:, tokens], parallel.seen(S, device=ids.device), positions
        layers, expected = run.source.config.num_hidden_layers, formula(parallel, B, S)
        measure_bytes(run, lambda: parallel.model(*inputs)[0], layers, expected)

    show_model(run, workload, parallelize, whole=whole, also=also, reduce=reduce)


def check_hidden_states(run, batch, parallel, references, tokens):
    """After every layer: of this rank's tokens, as the single-rank run has them."""
    ids, mask, _ = batch
    real = mask[:, tokens, None]  # padding positions are ignored

    @torch.no_grad()
    def hidden_states(model):
        return model(ids, attention_mask=mask, output_hidden_states=True).hidden_states

    expected = run.expect(hidden_states, references)
    pairs = [
        (h * real, *(e[:, tokens] * real for e in es))
        for h, es in zip(hidden_states(parallel), expected, strict=True)
    ]
    run.check("hidden states of this rank's tokens", pairs)


def check_packed(run, ids, parallel, references, reduce):
    """Several documents in a row, whose positions restart, as the unmodified model has them.

    Their first tokens have no label: nothing before them tells of them. ids: (B, S); reduce: see
    `show_model`.
    """
    B, S = ids.shape
    if S < 8:  # hardly a token would have a label
        return
    places = torch.arange(S, device=ids.device).expand(B, -1)
    # Documents of one token, of two, and longer ones; in each row at other places.
    starts = torch.tensor([0, 1, 3, S // 3, S // 2 + 1], device=ids.device)
    starts = (starts + torch.arange(B, device=ids.device)[:, None] * (starts > 1))[..., None]
    begins = (starts * (places[:, None] >= starts)).amax(1)
    labels = ids.masked_fill(places == begins, -100)
    packed = dict(position_ids=places - begins, use_cache=False)
    blocks = (begins[:, None, :, None] == begins[:, None, None]) & places.new_ones(
        S, S
    ).tril().bool()

    def from_loss(model, inputs):
        if model is parallel:
            value = model(**inputs | packed, labels=labels).loss
            return value, value
        own = {} if PACKS else {"attention_mask": blocks}
        losses = token_losses(model(**inputs | packed | own).logits, labels)
        return losses, mean_loss(losses, labels)

    step = partial(model_step, ids=ids, mask=None, function=from_loss)
    losses, grads = run.expect(step, references)
    value, grad = step(parallel, reduce=reduce)
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    expected = [mean_loss(of_one, labels).to(value.dtype) for of_one in losses]
    own = error_of_mean(*losses)
    run.check("packed documents: loss", [(value, *expected)], own=own)
    run.check("packed documents: input embeddings grad", [(grad, *grads)])
    for model in (parallel, *references):
        model.zero_grad()
