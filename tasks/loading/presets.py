"""Shapes of models whose weights are random: `--model random/NAME`."""

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PRESETS = {
    "small": dict(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1024, vocab_size=32000, max_position_embeddings=131072,
    ),
    "llama-3.2-1b": dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=500000.0,
        rope_scaling=LLAMA3_ROPE,
    ),
    "llama-3.2-1b-32k": {},  # the same with a vocabulary of 32000, see below
    "llama-3.1-8b": dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE | {"factor": 8.0},
    ),
}  # fmt: skip
PRESETS["balanced"] = PRESETS["small"] | dict(  # the head costs about as much as a layer
    hidden_size=512, num_hidden_layers=15, intermediate_size=2048, vocab_size=8192
)
PRESETS["small-8k"] = PRESETS["small"] | {"vocab_size": 8192}
PRESETS["small-50k"] = PRESETS["small"] | {"vocab_size": 50257}  # GPT-2's
PRESETS["small-128k"] = PRESETS["small"] | {"vocab_size": 128256}
PRESETS["llama-3.2-1b-32k"] = PRESETS["llama-3.2-1b"] | {"vocab_size": 32000}
PRESETS["246m"] = dict(  # 246m, 7b: of an article on training in parallel; GPT-2's vocabulary
    hidden_size=1024,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1536,
    vocab_size=50257,
    max_position_embeddings=256,
)
PRESETS["7b"] = dict(
    hidden_size=4096,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=32,
    intermediate_size=6144,
    vocab_size=50257,
    max_position_embeddings=256,
)
PRESETS["179m"] = dict(  # an article's, on pretraining with tensor parallelism and FSDP2
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=3,
    intermediate_size=3072,
    vocab_size=50000,
    max_position_embeddings=2048,
)
GPT2_PRESETS = {  # what is left out is as in the library's GPT2Config(), of 124,439,808 parameters
    "gpt2": {},
    "gpt2-small-test": dict(
        n_embd=32, n_layer=4, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0,
        eos_token_id=0,
    ),
}  # fmt: skip
# GPT-2's shape at a size that two CPU cores train in minutes.
GPT2_PRESETS["gpt2-mini"] = dict(
    n_embd=256,
    n_layer=4,
    n_head=4,
    n_positions=128,
    vocab_size=8192,
    bos_token_id=0,
    eos_token_id=0,
)
