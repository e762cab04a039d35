"""Bonus: generation with a KV cache, where each rank caches its own heads.

Attention never mixes heads, and a token's keys and values never change once they are computed. So
under tensor parallelism a rank keeps the keys (after RoPE) and values of the KV heads it owns, and
no part of the cache is ever sent. With more ranks than KV heads, a KV head is cached by each of
the ranks that hold it. Bytes on each rank, for L layers, S tokens so far, and e bytes an element:

    2 L B S max(K/P, 1) D e

Decoding takes one token at a time: an all-reduce of (B, 1, H) is a few KiB and bound by latency. So
what counts is how many collectives there are, and how many steps each takes, not the bytes. With
Task 2's model the loop below needs 2 L + 1 collectives a token: two in every layer (each takes one
step on CPUs: `SMALL` in shared_memory/group.py), and one that chooses the next token. There every
rank sends its best logit, with that token's id and embedding, (B, 2 + H). So logits are never
gathered, and the next forward starts without a collective. `DecodingStep` is one step of this loop,
for a static cache, so that a GPU can record a token's step as a CUDA graph (not run on a GPU yet).

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/kv_cache.py

continues a batch of prompts of different lengths (padded on the left) with the models of Tasks 2
and 3: cached, recomputed, and by Hugging Face's own `.generate`, with a cache that grows and with a
static one. Each way gives the tokens of the single-rank run, and each rank's cache is a slice of
the single rank's. Then it measures tokens per second.
"""

import copy
import inspect
import statistics
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, GenerationConfig, LlamaModel, StaticCache

import harness
import loading
from utils.collectives import all_gather
from utils.errors import UserError
from utils.llama import BY_LENGTH, rope_of, window_of
from utils.partition import shard_heads

# What a forward calls its KV cache: `cache` from transformers 5.24 on.
FORWARD_TAKES = inspect.signature(LlamaModel.forward).parameters
CACHE = "cache" if "cache" in FORWARD_TAKES else "past_key_values"

WARM_UP = 3  # steps before one is recorded: libraries allocate what they need

# ---------------------------------------------------------------- the technique


@torch.no_grad()
def generate(model, ids, mask, new_tokens, choose, cache=None):
    """Continue ids (B, S) greedily; return ids (B, S + new_tokens).

    mask (B, S): 0 for padding, on the left. choose(model, logits (B, 1, V or V/P)) returns the next
    tokens (B, 1) and their embeddings (B, 1, H). cache: an empty DynamicCache or StaticCache;
    without a cache, each new token takes a forward of the full sequence. Raises ValueError for a
    cache that is not empty.
    """
    for token in each_token(model, ids, mask, new_tokens, choose, cache):
        ids = torch.cat([ids, token], dim=1)
    return ids


@torch.no_grad()
def each_token(model, ids, mask, new_tokens, choose, cache=None):
    """Yield the new tokens (B, 1) of `generate`, one position after the other."""
    if cache is not None and cache.get_seq_length():
        raise ValueError("a cache that has tokens already: use a new one, or reset it")
    x = model.get_input_embeddings()(ids)
    for _ in range(new_tokens):
        # Positions count real tokens: a row with padding begins at 0, too. Take those of x.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :]
        output = model.model(
            inputs_embeds=x,
            attention_mask=mask,
            position_ids=positions,
            use_cache=cache is not None,
            **{CACHE: cache},
        )
        token, row = choose(model, model.lm_head(output.last_hidden_state[:, -1:]))
        yield token
        mask = F.pad(mask, (0, 1), value=1)
        x = torch.cat([x, row], dim=1) if cache is None else row


def choose_from_full_logits(model, logits):
    """Return the likeliest tokens (B, 1) by full logits (B, 1, V), with embeddings (B, 1, H).

    Task 3's logits, a DTensor, are gathered first. Raises ValueError for logits of a part of the
    vocabulary.
    """
    if isinstance(logits, DTensor):
        from dtensor_llama import full_logits

        logits = full_logits(logits)
    if logits.shape[-1] != model.config.vocab_size:
        words = f"{logits.shape[-1]} of {model.config.vocab_size}"
        raise ValueError(f"logits of {words} tokens: use choose_among_ranks")
    token = logits.argmax(-1)
    return token, model.get_input_embeddings()(token)


def choose_among_ranks(model, logits):
    """Return tokens (B, 1) and embeddings (B, 1, H) by split logits (B, 1, V/P), in one collective.

    Every rank offers its best token, with the token's logit and embedding, (B, 2 + H). The largest
    logit wins; among equal logits the lowest token id wins, as in argmax.
    """
    embedding = model.get_input_embeddings()
    index = logits.argmax(-1)  # (B, 1), of this rank's rows
    row = F.embedding(index, embedding.weight)[:, 0]  # (B, H)
    wide = torch.promote_types(row.dtype, torch.float32)  # holds token ids exactly up to 2^24
    value, token = logits[:, 0].gather(-1, index), index + embedding.rows[0]
    offer = torch.cat([x.to(wide) for x in (value, token, row)], -1)
    offers = all_gather(offer, embedding.get_group())
    rows = torch.arange(len(index), device=index.device)
    best = offers[offers[:, :, 0].argmax(0), rows]  # (B, 2 + H)
    return best[:, 1:2].long(), best[:, None, 2:].to(row.dtype)


# ---------------------------------------------------------------- in place, by a CUDA graph


class DecodingStep:
    """One more token of `generate`, with a StaticCache, in tensors whose addresses stay the same.

    Nothing here waits for the device or depends on the text's length so far. So a CUDA graph can
    record the step once, collectives included, and replay it for every token.

    ids (B, length): prompt, new tokens so far (one or more), and room for the others. at (1,): the
    position of the last token so far, which the cache does not have yet. row (B, 1, H): that
    token's embedding. bias (B, 1, 1, the cache's length): 0 for what it may attend to, else minus
    infinity. (Not bool: eager attention would add True and False as 1 and 0.)
    """

    @torch.no_grad()
    def __init__(self, model, ids, mask, new_tokens, choose, cache):
        """Run `generate`'s first step: the forward of the prompt, which gives the first new token.

        Raises ValueError for no new token, and for a cache that is not static, or too short.
        """
        if new_tokens < 1 or not isinstance(cache, StaticCache):
            raise ValueError("decoding in place needs a new token or more, and a StaticCache")
        self.model, self.choose, self.cache = model, choose, cache
        self.at = torch.tensor([ids.shape[1]], device=ids.device)
        length, rooms = mask.shape[1] + new_tokens, rooms_of(cache)
        if len(rooms) > 1 or min(rooms) < length:
            raise ValueError(f"a cache of {min(rooms)} tokens: {length} are needed")
        ids = generate(model, ids, mask, 1, choose, cache)
        self.row = model.get_input_embeddings()(ids[:, -1:])
        self.positions = mask.sum(-1, keepdim=True)
        self.ids = F.pad(ids, (0, new_tokens - 1))
        unseen = F.pad(mask, (0, min(rooms) - mask.shape[1])) == 0
        self.bias = self.row.new_zeros(unseen.shape).masked_fill(unseen, -torch.inf)[:, None, None]
        self.bias.index_fill_(3, self.at, 0)

    @torch.no_grad()
    def __call__(self):
        place = {"cache_position": self.at} if "cache_position" in FORWARD_TAKES else {}
        output = self.model.model(
            inputs_embeds=self.row,
            attention_mask=self.bias,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE: self.cache},
            **place,
        )
        token, row = self.choose(self.model, self.model.lm_head(output.last_hidden_state))
        for tensor in self.at, self.positions:
            tensor.add_(1)
        self.row.copy_(row)
        self.ids.index_copy_(1, self.at, token)
        self.bias.index_fill_(3, self.at, 0)


def rooms_of(cache):
    """Return for how many tokens a StaticCache's layers have room: with a window for fewer."""
    if hasattr(cache, "layers"):
        return {layer.max_cache_len for layer in cache.layers}
    return {cache.get_max_cache_shape()}  # transformers 4


def generate_in_place(model, ids, mask, new_tokens, choose, cache, by_graph=True):
    """Do as `generate` does, with a StaticCache that has room for all tokens.

    by_graph: on a GPU, all tokens but the first few are replays of a CUDA graph.
    """
    step = DecodingStep(model, ids, mask, new_tokens, choose, cache)
    eager = min(WARM_UP, new_tokens - 1) if by_graph else new_tokens - 1
    for _ in range(eager):
        step()
    left = new_tokens - 1 - eager
    run = recorded(step) if left else step
    for _ in range(left):
        run()
    return step.ids


def recorded(step):
    """Record step() as a CUDA graph, without running it, and return what replays it.

    Where nothing can be recorded, return the step itself: on a CPU; with gloo, which waits for the
    device; with RoPE whose factors depend on the text's length.
    """
    on_cuda = step.ids.device.type == "cuda"
    by_nccl = not dist.is_initialized() or dist.get_backend() == "nccl"
    by_length = rope_of(step.model.config).get("rope_type") in BY_LENGTH
    if not on_cuda or not by_nccl or by_length:
        return step
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's own thread may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return partial(replay, graph, step)


def replay(graph, step):
    """Replay a recorded step. `step` is held here so that its tensors live as long as the graph."""
    graph.replay()


# ---------------------------------------------------------------- the caches


def make_cache(cache_type, model, kv_heads, batch_size, length):
    """Return an empty cache: dynamic, static for `length` tokens, or None.

    kv_heads: the number of this rank's KV heads. transformers 4 reads it from the configuration. So
    a copy of the configuration gets it; the model's own still has the full model's number.
    """
    if cache_type == "dynamic":
        return DynamicCache()
    if cache_type is None:
        return None
    config, weight = copy.deepcopy(model.config), model.model.norm.weight
    config.head_dim, config.num_key_value_heads = model.model.layers[0].self_attn.head_dim, kv_heads
    return StaticCache(
        config=config,
        max_batch_size=batch_size,
        max_cache_len=length,
        device=weight.device,
        dtype=weight.dtype,
    )


def contents(cache):
    """List keys and values of the first layer, of the second, ..., each (B, K, length, D)."""
    if hasattr(cache, "layers"):
        return [x for layer in cache.layers for x in (layer.keys, layer.values)]
    pairs = zip(cache.key_cache, cache.value_cache, strict=True)  # transformers 4
    return [x for pair in pairs for x in pair]


# ---------------------------------------------------------------- what is shown with it


def check_generation(run, name, model, choose, prompts, count, expected, references):
    """Check every way to continue the prompts: its tokens and cache are those of a single rank."""
    (ids, mask), config = prompts, run.source.config
    length = ids.shape[1] + count
    first, stop = local_kv_heads(run)
    caches, results = {}, {}
    sizes = {}  # {how: (bytes of its cache, tokens that it has room for)}

    def by_loop(cache):
        return generate(model, ids, mask, count, choose, cache)

    def in_place(cache):
        # (Whether DTensor's collectives can be recorded has not been tried.)
        return generate_in_place(model, ids, mask, count, choose, cache, name == "hand-made")

    def by_hf(cache):
        return harness.hf_generate(model, ids, count, attention_mask=mask, **{CACHE: cache})

    for how, function, cache_type in (
        ("recomputed", by_loop, None),
        ("cached", by_loop, "dynamic"),
        ("cached, static", by_loop, "static"),
        ("cached, in place", in_place, "static"),
        ("cached, by .generate", by_hf, "dynamic"),
        ("cached, static, by .generate", by_hf, "static"),
    ):
        cache = make_cache(cache_type, model, stop - first, len(ids), length)
        tokens = results[how] = function(cache)
        if cache is not None:
            room = length if cache_type == "static" else length - 1
            caches[how], sizes[how] = cache, (sum(x.nbytes for x in contents(cache)), room)
        by = f" by {name}, {how}"
        harness.check_text(run, tokens, expected, references, mask, by, show=how == "cached")

    # Compare each cache's contents, and the last token's logits computed from them.
    # Padding is cached too; its positions are ignored.
    real = F.pad(mask, (0, count - 1), value=1)[:, None, :, None]
    S, D = length - 1, model.model.layers[0].self_attn.head_dim  # the last token is not cached yet
    full, expected = {}, None
    for how, cache in caches.items():
        if expected is None or not results[how].equal(expected):  # texts may part at a tie
            expected = results[how]
            full = run.reference_values(
                lambda m, ids=expected: all_at_once(m, ids, mask), references
            )
        local = [x[:, :, :S].clone() for x in contents(cache)]
        pairs = [
            (x * real, *(y[:, first:stop, :-1] * real for y in all_heads))
            for x, all_heads in zip(local, full[1:], strict=True)
        ]
        run.compare(f"{name}, cached keys and values, slices of the whole", pairs)
        logits = last_logits(model, expected, mask, cache)
        run.compare(f"{name}, cached logits", [(logits, *full[0])])
    run.show("outputs", full[0][0], logits)
    run.check(f"{name}, cached keys and values, slices of the whole")
    run.check(f"{name}, cached logits")
    token = 2 * config.num_hidden_layers * len(ids) * (stop - first) * D * run.dtype.itemsize
    run.print_in_order(
        f"cache of {len(ids)} x {S} tokens: {sizes['cached'][0]} bytes, "
        f"2 L B S k D e = {S * token}, "
        f"k = {stop - first} of {config.num_key_value_heads} KV heads (rank={run.rank})"
    )
    pairs = [(torch.tensor(size), torch.tensor(room * token)) for size, room in sizes.values()]
    run.check(f"{name}, bytes cached", pairs, tolerance=0.0)
    run.results[f"{key(name)}_cache_bytes"] = sizes["cached"][0]


def local_kv_heads(run):
    """Return [first, stop) of the KV heads that this rank caches."""
    config = run.source.config
    heads = config.num_attention_heads, config.num_key_value_heads
    return shard_heads(*heads, run.world_size, run.rank)[1]


@torch.no_grad()
def last_logits(model, ids, mask, cache, new=1):
    """Return the last token's logits (B, V); the cache holds all tokens but the last `new`."""
    mask = F.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]
    return model(
        ids[:, -new:], attention_mask=mask, position_ids=positions, **{CACHE: cache}
    ).logits[:, -1]


def all_at_once(model, ids, mask):
    """Return the last token's logits from one forward of all ids, then all keys and values."""
    cache = DynamicCache()
    return last_logits(model, ids, mask, cache, new=ids.shape[1]), *contents(cache)


def key(name):
    """Turn a name into a part of a key in the JSON record."""
    return name.lower().replace(" ", "_").replace("-", "_")


def generation(model, ids, new_tokens, choose, threads):
    """Generate with a cache, to be timed by `harness.interleave`; without a model, do nothing.

    There are two phases: the prompt with the first new token, and all other new tokens.
    """
    with harness.num_threads(threads):
        tokens = iter(())
        if model:
            mask = torch.ones_like(ids)
            tokens = each_token(model, ids, mask, new_tokens, choose, DynamicCache())
        next(tokens, None)
        yield "prompt"
        for _ in tokens:
            pass
        yield "generate"


def replays(model, ids, new_tokens, choose, kv_heads):
    """Record a step once, then replay it: to be timed by `harness.interleave`."""
    length = ids.shape[1] + 1 + WARM_UP + new_tokens
    cache = make_cache("static", model, kv_heads, len(ids), length)
    step = DecodingStep(model, ids, torch.ones_like(ids), length - ids.shape[1], choose, cache)
    for _ in range(WARM_UP):
        step()
    run_recorded = recorded(step)
    yield "record"
    for _ in range(new_tokens):
        run_recorded()
    yield "generate"


def say_times(run, seconds, new_tokens):
    """Print how long each way of generating took, and its ratio to the first way's time."""
    alone = next(iter(seconds.values()))
    for name, phases in seconds.items():
        tokens, said = phases["generate"], ""
        each = statistics.median(tokens) / (new_tokens - 1)
        run.results[f"{key(name)}_tokens_s"] = tokens
        if prompt := phases.get("prompt"):
            of_prompt = harness.ratio(prompt, alone["prompt"])
            said = f"; the prompt {statistics.median(prompt):.4f} s, {of_prompt}"
            run.results[f"{key(name)}_prompt_s"] = prompt
        run.print0(
            f"time {name}: {1e3 * each:.2f} ms a token, {1 / each:.1f} tokens/s, "
            f"median ratio {harness.ratio(tokens, alone['generate'])}{said}"
        )


def measure(run, models, reference, prompt_len, new_tokens, repeats):
    """Print how long a prompt of `prompt_len` tokens takes, and each token after it."""
    config, new_tokens = run.source.config, max(2, new_tokens)
    length = min(prompt_len, config.max_position_embeddings - new_tokens)
    if length < prompt_len:
        run.print0(f"note: timed after {length} tokens, not {prompt_len}: the context ends there")
    ids = run.broadcast(torch.randint(config.vocab_size, (1, length)))
    threads, all_threads = torch.get_num_threads(), harness.threads_alone(run)
    timed = partial(generation, ids=ids, new_tokens=new_tokens)
    contenders = {
        "one rank": partial(timed, reference, choose=choose_from_full_logits, threads=all_threads)
    }
    for name, (model, choose) in models.items():
        contenders[name] = partial(timed, model, choose=choose, threads=threads)
    if run.device.type == "cuda":
        model, choose = models["hand-made"]
        first, stop = local_kv_heads(run)
        contenders["hand-made, a graph a token"] = partial(
            replays, model, ids, new_tokens - 1, choose, stop - first
        )
    seconds = harness.interleave(run, contenders, repeats)
    say_times(run, seconds, new_tokens)
    alone = seconds["one rank"]["generate"]
    run.print0(
        f"({new_tokens} tokens after {length}, the first with the prompt, {len(alone)} times, "
        f"slowest rank; {threads} thread(s) a rank, {all_threads} for the one alone)"
    )
    harness.say_if_short(run, alone)


def main():
    parser = harness.make_parser(__doc__, model_types=loading.LLAMAS)
    add = parser.add_argument
    add(
        "--prompt",
        nargs="+",
        metavar="TEXT",
        default=["A quick brown fox", "One day", "The cat and the dog went to"],
        help="texts to continue, as one batch; default %(default)s",
    )
    add("--new-tokens", type=harness.positive, default=10, help="tokens to continue by; default 10")
    add("--prompt-len", type=harness.positive, default=128, help="tokens, when timed; default 128")
    add("--repeats", type=harness.natural, help=harness.REPEATS_HELP)
    harness.start(parser.parse_args(), show)


def show(run, args):
    """Check both models' texts and caches, by each way to generate; measure their speed."""
    from dtensor_llama import dtensor_parallelize
    from tp_llama import tensor_parallelize

    mesh = run.mesh("tp")
    prompts = harness.encode_prompts(run, args.prompt, args.new_tokens)
    refuse_what_depends_on_length(run.source.config, prompts[0].shape[1] + args.new_tokens)

    def load(parallelize=None):
        model = run.load_model(parallelize)
        # No end token, no penalties: so .generate gives --new-tokens tokens, greedily.
        model.generation_config = GenerationConfig()
        # On a GPU, .generate would compile the forward for a static cache, which cannot be done
        # with the collectives.
        model.get_compiled_call = lambda config: model.__call__
        return model

    reference = load() if run.rank == 0 else None
    references = run.references(reference)
    by_hand = run.together(lambda: load(partial(tensor_parallelize, mesh=mesh)))
    dtensor = run.together(lambda: load(partial(dtensor_parallelize, mesh=mesh)))
    models = {
        "hand-made": (by_hand, choose_among_ranks),
        "DTensor": (dtensor, choose_from_full_logits),
    }
    ((expected, *_), *alone) = run.reference_values(
        lambda model: continuations(model, prompts, args.new_tokens), references[:1]
    )
    if run.dtype != torch.bfloat16:  # in bfloat16 the two may break ties differently
        pairs = [(row[-len(x[0][0]) :], x[0][0]) for row, x in zip(expected, alone, strict=True)]
        run.check("a prompt alone, or padded in a batch: tokens", pairs, tolerance=0.0)
    for name, model in models.items():
        check_generation(run, name, *model, prompts, args.new_tokens, expected, references)
    if args.repeats != 0:
        measure(run, models, reference, args.prompt_len, args.new_tokens, args.repeats)


def refuse_what_depends_on_length(config, tokens):
    """Raise UserError where longrope would take its factors for long texts, or a window slides.

    In transformers, too, a cached key keeps the factors by which it was computed. So a text would
    depend on when its tokens were cached, and no one text would be the right one. With a sliding
    window, transformers' caches keep the last tokens only, each kind of cache in its own layout.
    """
    if (window := window_of(config)) and tokens > window:
        raise UserError(f"sliding_window {window}: prompt and --new-tokens are {tokens}")
    rope = rope_of(config)
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope.get("rope_type") == "longrope" and tokens > limit:
        raise UserError(
            f"RoPE longrope has other factors beyond {limit} tokens, and cached keys "
            f"keep theirs: prompt and --new-tokens are {tokens}"
        )


def continuations(model, prompts, new_tokens):
    """Continue, without a cache, the batch of prompts, and then each prompt without padding."""
    batch = generate(model, *prompts, new_tokens, choose_from_full_logits)
    alone = [
        generate(model, row[None, m == 1], m[None, m == 1], new_tokens, choose_from_full_logits)
        for row, m in zip(*prompts, strict=True)
    ]
    return batch, *alone


if __name__ == "__main__":
    main()
