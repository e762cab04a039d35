"""What each task claims, and which of its checks prove it; its command, which the README shows."""

GOLDEN = "the demo's printed values, to their four digits", "^golden"
LAST_LOSS = "and the last one below 1 % of the first", "^last loss"
GRADIENTS = "gradients of all weights", r"\.weight grad$"
MODEL = [
    ("logits", "^logits$"),
    ("loss", "^loss$"),
    ("gradients of the input embeddings, also under random upstream", "input embeddings grad$"),
    GRADIENTS,
]  # fmt: skip
STEP = [
    ("logits", ": logits$"), ("loss", ": loss$"), ("gradients of all weights", ": gradients$"),
    ("gradients of the input embeddings", "input embeddings grad$"),
    ("what three steps change", ": changes by 3 steps$"),
]  # fmt: skip
TOKENS = "generated tokens, 10, by a forward each", "^generated tokens$"
PACKED = "several documents in a sequence: loss, some gradients", "^packed documents"
SENT = "bytes that a rank sends for a layer", "^bytes sent"
TASK = {
    # script: (title, ranks, more flags, [(claim, regular expression of its checks' names)])
    "tp_mlp": ("Part 1", 4, [], [
        ("every shard a slice of the whole, and none the whole", "weights, "),
        GOLDEN,
        ("output", "^(?!golden).* output$"),
        ("input gradient, of a sum and of random upstream", "^(?!golden).* input grad$"),
        GRADIENTS,
        ("recomputation drops the same values again", "recomputed with dropout"),
        ("the norm's gradient needs no synchronisation", "norm grad, same bits"),
    ]),
    "tp_attention": ("Task 1", 2, [], [
        ("output: causal, bidirectional, padded", " output$"),
        ("input gradient, of a sum, a norm and random upstream", " input grad$"),
        GRADIENTS,
    ]),
    "tp_llama": ("Task 2", 2, [], [
        ("every shard a slice of the whole, and none the whole", "weights, "), *MODEL, TOKENS,
    ]),
    "dtensor_llama": ("Task 3", 2, ["--overfit", "60"], [
        GOLDEN, *MODEL,
        ("tokens by .generate, 10 and 40", "^generated tokens by .generate"),
        ("one batch overfitted: each step's loss", "^losses while overfitting"),
        LAST_LOSS,
    ]),
    "kv_cache": ("KV cache", 2, [], [
        ("tokens of 3 prompts, by hand and DTensor, 6 ways each", "^generated tokens|tokens$"),
        ("logits from the cache", "cached logits$"),
        ("every rank's keys and values, slices of the whole", "cached keys and values"),
        ("bytes cached, as the formula says", "bytes cached$"),
    ]),
    "pipeline_llama": ("Pipeline", 2, [], [
        ("each weight on some rank", "weights, "), *STEP,
        ("copies of a tied embedding, after them", "copies of a parameter"),
    ]),
    "data_parallel": ("Data parallel", 2, [], [
        ("each sample on one rank", "^samples that"),
        ("ranks' gradients differ, before the average", "same gradients before"),
        *STEP,
        ("the bits of gradients, averaged, and parameters", "copies of"),
        ("bytes of weights, gradients, states", ": bytes of weights"),
    ]),
    "tp_naive": ("Naive TP", 2, [], [
        ("a product, its gradients, by columns and by rows", "^product by"),
        ("every shard a slice of the whole, and none the whole", "weights, "),
        ("two layers: outputs", ": outputs$"),
        ("two layers: loss", ": loss$"),
        ("input gradient", ": input grad$"),
        GRADIENTS,
    ]),
    "tp_training": ("TP training", 2, [], [
        ("every shard a slice of the whole", "weights, "),
        ("losses of five iterations, both batches", ": losses$"),
        ("what they change", ": changes by 5 iterations$"),
        ("the bits of what is whole, after them", ": copies of a parameter"),
    ]),
    "pretrain_2d": ("Pretraining", 4, ["--dp", "2", "--tp", "2"], [
        ("every shard a slice of the whole, and none the whole", "weights, "),
        ("loss of the first step", "^loss of the first step$"),
        ("gradients of all weights", "^gradients of the first step"),
        ("losses of ten steps of AdamW", "^losses of"),
        ("the loss of texts held out", "^held-out loss"),
        ("norms of all gradients, over both axes", "^norms of"),
        ("learning rates", "^learning rates"),
        ("copies of a norm, to the bit", "^copies of"),
    ]),
    "pipeline_threads": ("Threads", 1, [], [
        *STEP, ("the bits of one microbatch after another", "one microbatch after another"),
    ]),
    "ulysses_forward": ("Task 4", 2, [], [
        ("hidden states of every layer", "^hidden states"), *MODEL, TOKENS, PACKED, SENT,
    ]),
    "ring_attention": ("Ring", 3, [], [
        ("hidden states of every layer", "^hidden states"), *MODEL, TOKENS, PACKED, SENT,
        ("its simplest form, on its own: outputs and gradients of one attention", "^simplest ring"),
    ]),
    "tp_ulysses": ("TP x Ulysses", 4, ["--tp", "2", "--sp", "2"], [
        ("hidden states of every layer", "^hidden states"), *MODEL, TOKENS, PACKED, SENT,
    ]),
    "ulysses_finetune": ("Task 5", 2, [], [
        ("losses beside plain PEFT, three steps", "^losses$"),
        ("gradients before the optimizer", r"\.weight grad$"),
        ("parameters after it", "after a step$"),
        ("each memory technique alone, and all together", ": (loss|gradients)$"),
        ("the replicas' bits, before and after", "^hash"),
    ]),
}  # fmt: skip
