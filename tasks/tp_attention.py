"""Task 1: Llama attention, tensor-parallel by whole heads.

The one idea (Megatron-LM, arXiv 1909.08053, section 3): a head needs no other head until the
output projection adds them up. So each rank owns N/P query heads with the key/value heads they
attend to: their rows of q_proj, k_proj and v_proj, and their columns of o_proj. RoPE, mask and
softmax run unchanged, on local heads. Before them stands f, which all-reduces in the backward;
after them g, which all-reduces in the forward: one collective each way.

    x --f--> q, k, v (local heads) --> RoPE, attention --> o_proj (partial sum) --g--> y

With grouped-query attention, a group of G = N/K query heads has one key/value head. Ranks get whole
groups, or, if there are too few, split a group. Here N = 8, K = 4 (q0 q1 use k0, and so on):

    ranks   rank 0       rank 1       rank 2       rank 3       ...
    3       q0..q3 k0k1  q4 q5 k2     q6 q7 k3                  uneven: 4 groups over 3 ranks
    4       q0 q1  k0    q2 q3 k1     q4 q5 k2     q6 q7 k3
    8       q0     k0    q1     k0    q2     k1    q3     k1    k0 held twice: its gradient is a sum

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/tp_attention.py

compares output, input gradient and weight gradients with the full layer's on rank 0, at the
assignment's size (1 x 128 x 4096), at Llama-3.2-1B's, with biases and one KV head for all ranks,
and on layer 0 of --model. First it runs the test of the assignment's template: causal,
.sum().backward(). Then it compares causal, bidirectional, and causal attention with left padding,
with a random gradient of the output. Last comes the assignment's example: layer 5 of Llama-3.2-1B,
128 tokens, .norm().backward().
"""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

import harness
import loading
from utils.collectives import copy_to_region, group_of_axis, reduce_from_region, subgroup
from utils.llama import getter
from utils.partition import shard_heads
from utils.shards import ReplicatedKVLinear, keep_shard

SHAPES = {
    "assignment": dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8),
    "one-kv-head": dict(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=1, attention_bias=True
    ),
}


def tensor_parallelize_attention(attention, mesh):
    """Make a LlamaAttention tensor-parallel in place, over the ranks of a `mesh` of one axis.

                      full          local
    q_proj            (N D, H)      (N/P D, H)           column-parallel, whole heads
    k_proj, v_proj    (K D, H)      (max(K/P, 1) D, H)   the KV heads of those query heads
    o_proj            (H, N D)      (H, N/P D)           row-parallel

    Shares may be uneven, see `shard_heads`; with more ranks than KV heads, a KV head is held by
    several ranks and its gradient summed over them. Biases of q, k, v go with their heads; the
    bias of o_proj must enter the sum over ranks once, so only rank 0 of the axis has it.
    Raises UserError for more ranks than query heads.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    group, D = group_of_axis(mesh), attention.head_dim
    rank, ranks = group.rank(), group.size()
    num_heads = attention.q_proj.out_features // D
    num_kv_heads = attention.k_proj.out_features // D
    queries, keys, kv_replicas = shard_heads(num_heads, num_kv_heads, ranks, rank)
    keep_shard(attention.q_proj, 0, queries[0] * D, queries[1] * D)
    keep_shard(attention.k_proj, 0, keys[0] * D, keys[1] * D)
    keep_shard(attention.v_proj, 0, keys[0] * D, keys[1] * D)
    keep_shard(attention.o_proj, 1, queries[0] * D, queries[1] * D)
    # Hugging Face's forward takes any number of local heads; it only has to know how many query
    # heads share a local KV head.
    attention.num_key_value_groups = (queries[1] - queries[0]) // (keys[1] - keys[0])
    if rank != 0:
        attention.o_proj.bias = None
    if ranks > num_kv_heads:
        kv_replica_group = subgroup(group, f"of {num_kv_heads}", *kv_replicas)
        for layer in attention.k_proj, attention.v_proj:
            layer.__class__, layer.get_kv_replica_group = (
                ReplicatedKVLinear,
                getter(kv_replica_group),
            )

    def f(module, args, kwargs):
        return args, kwargs | {"hidden_states": copy_to_region(kwargs["hidden_states"], group)}

    attention.register_forward_pre_hook(f, with_kwargs=True)
    attention.o_proj.register_forward_hook(lambda module, args, y: reduce_from_region(y, group))


# ---------------------------------------------------------------- what is shown with it


def make_masks(batch_size, seq_len, dtype, device):
    """Return {name: attention mask to add to the scores, (1 or B, 1, S, S), or None}.

    Without a mask the model's SDPA is causal, so bidirectional attention takes a mask of zeros. (In
    eager attention None is bidirectional.) ".sum()": the causal mask of the assignment's template.
    """
    lowest = torch.finfo(dtype).min
    everything = torch.zeros(1, 1, seq_len, seq_len, dtype=dtype, device=device)
    causal = everything.masked_fill(torch.ones_like(everything).triu(1).bool(), lowest)
    padded = causal.repeat(batch_size, 1, 1, 1)
    padded[-1, :, :, : seq_len // 3] = lowest  # the last sequence is a third shorter
    padded[-1, 0].fill_diagonal_(0)  # kernels differ on a query without keys: it sees itself
    kinds = {"causal": None, "bidirectional": everything, "causal, padded": padded}
    return kinds | {".sum()": causal}


def attention_step(attention, x, loss, rotary_tables, mask):
    """Run forward and loss(y).backward(); return output and input gradient, (B, S, H) each."""
    attention.zero_grad()
    dtype = attention.q_proj.weight.dtype
    x = x.to(dtype, copy=True).requires_grad_()
    rotary_tables = [table.to(dtype) for table in rotary_tables]
    mask = None if mask is None else mask.to(dtype)
    y, _ = attention(hidden_states=x, position_embeddings=rotary_tables, attention_mask=mask)
    assert x.grad is None
    loss(y).backward()
    return y.detach(), x.grad


def empty_attention(config, mesh=None, layer_idx=0):
    """Return a LlamaAttention without values, or with `mesh` this rank's share of it."""
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        attention = LlamaAttention(config, layer_idx).eval()
    if mesh:
        tensor_parallelize_attention(attention, mesh)
    return attention


def make_inputs(run, config, batch_size, seq_len):
    """Return x and the output's gradient, (B, S, H), drawn from the seed, and RoPE's tables."""
    torch.manual_seed(run.seed)
    x, upstream = torch.randn(2, batch_size, seq_len, config.hidden_size, dtype=torch.float32)
    x, upstream = x.to(run.device, run.dtype), upstream.to(run.device, run.dtype)
    rotary = LlamaRotaryEmbedding(config).to(run.device)
    rotary = harness.Rotary64(rotary) if run.dtype == torch.float64 else rotary
    return x, upstream, rotary(x, torch.arange(seq_len, device=run.device)[None])


def compare_template(run, title, references, parallel, x, *others):
    """Run the test of the assignment's template: forward, and .sum().backward() to the input."""
    results = attention_step(parallel, x, torch.sum, *others)
    expected = run.reference_values(
        lambda layer: attention_step(layer, x, torch.sum, *others), references
    )
    run.print0(f"--- {title}, .sum().backward()")
    for shown_as, name, actual, values in zip(
        ("outputs", "input grad"), ("output", "input grad"), results, expected, strict=True
    ):
        run.show_as_asked(title, shown_as, values[0], actual)
        run.check(f"{title} .sum() {name}", [(actual, *values)])


def compare(run, title, reference, parallel, batch_size, seq_len):
    """Run all checks of one layer. reference: the full layer on rank 0, None elsewhere."""
    references, config = run.references(reference), parallel.config
    run.check_weights(title, parallel, references)
    x, upstream, rotary_tables = make_inputs(run, config, batch_size, seq_len)
    masks = make_masks(batch_size, seq_len, run.dtype, run.device)
    compare_template(run, title, references, parallel, x, rotary_tables, masks.pop(".sum()"))

    def loss(y):  # its gradient is random, so that no symmetry hides a mistake
        return (y * upstream).sum()

    for mask_name, mask in masks.items():
        if mask_name == "causal, padded":  # no loss comes from padding
            upstream[-1, : seq_len // 3] = 0
        y, x_grad = attention_step(parallel, x, loss, rotary_tables, mask)
        expected_y, expected_x_grad = run.reference_values(
            lambda layer, mask=mask: attention_step(layer, x, loss, rotary_tables, mask), references
        )
        run.print0(f"--- {title}, {mask_name}")
        run.show("outputs", expected_y[0], y)
        run.show("input grad", expected_x_grad[0], x_grad)
        run.check(f"{title} {mask_name} output", [(y, *expected_y)])
        run.check(f"{title} {mask_name} input grad", [(x_grad, *expected_x_grad)])
        run.check_gradients(f"{title} {mask_name}", parallel, references)
        run.check_same_bits(f"{title} {mask_name} output, same bits on all ranks", y)
        if mask_name == "causal":
            expected_causal = [full[0] for full in expected_y]
    # The last mask hides padding. So with other padding the tokens after it must have the same
    # output; and a sequence without padding must have the causal mask's output.
    changed, padding = x.clone(), seq_len // 3
    changed[-1, :padding] += 1
    changed_y, _ = attention_step(parallel, changed, loss, rotary_tables, mask)
    pairs = [(changed_y[-1, padding:], y[-1, padding:])]
    run.check(f"{title} {mask_name} output, whatever the padding", pairs, tolerance=0.0)
    if batch_size > 1 and run.dtype != torch.bfloat16:
        run.check(f"{title} {mask_name} output, not padded", [(y[0], *expected_causal)])


def main():
    shapes = ["model", *SHAPES, "llama-3.2-1b", "example"]
    parser = harness.make_parser(__doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=shapes,
        default=shapes,
        help="which attention: layer 0 of --model, these sizes with random weights, or the "
        "assignment's example; default all",
    )
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Run the checks of each shape."""
    for shape in args.shapes:
        if shape == "model":
            compare_model(run)
        elif shape == "example":
            show_example(run)
        else:
            layers = random_layers(run, shape)
            compare(run, shape, *layers, 1 if shape == "assignment" else 2, seq_len=128)


def compare_model(run):
    """Compare layer 0 of --model, with its own weights."""

    def read(name, shard=None):
        return run.source.read(f"model.layers.0.self_attn.{name}", shard)

    def load(mesh=None):
        attention = empty_attention(run.source.config, mesh)
        return loading.materialize(attention, read, run.dtype, run.device)

    reference = load() if run.rank == 0 else None
    parallel = run.together(lambda: load(run.mesh("tp")))
    compare(run, run.source.name, reference, parallel, batch_size=2, seq_len=37)


def random_layers(run, shape, layer_idx=0):
    """Return the reference (on rank 0) and the parallel layer, with Hugging Face's initial weights.

    Rank 0 draws the weights by the seed, and sends them; each rank keeps its slices.
    """
    sizes = SHAPES.get(shape) or loading.PRESETS[shape]  # with its RoPE
    config, reference = LlamaConfig(**sizes, attn_implementation="sdpa"), None
    if run.rank == 0:
        torch.manual_seed(run.seed)
        reference = run.place(LlamaAttention(config, layer_idx)).eval()
    parallel = run.together(lambda: empty_attention(config, run.mesh("tp"), layer_idx))
    read = run.deal(reference, parallel)
    return reference, loading.materialize(parallel, read, run.dtype, run.device)


def show_example(run):
    """Run the assignment's example of one layer on all ranks; print it as the assignment does."""
    reference, parallel = random_layers(run, "llama-3.2-1b", layer_idx=5)
    references = run.references(reference)
    x, _, rotary_tables = make_inputs(run, parallel.config, batch_size=1, seq_len=128)
    # The example gives no mask, and runs eager attention, which then is bidirectional.
    mask = make_masks(1, 128, run.dtype, run.device)["bidirectional"]
    others = torch.norm, rotary_tables, mask
    results = attention_step(parallel, x, *others)
    expected = run.reference_values(lambda layer: attention_step(layer, x, *others), references)
    run.print0("--- example: layer 5 of llama-3.2-1b, .norm().backward()")
    for name, actual, values in zip(("output", "input.grad"), results, expected, strict=True):
        run.print0(f"{name}={actual.cpu()}")
        name = name.replace(".", " ")
        run.check(f"example {name}", [(actual, *values)])
        run.check_same_bits(f"example {name}, same bits on all ranks", actual)


if __name__ == "__main__":
    main()
