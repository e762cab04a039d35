"""Which module of this package has the names that scripts use."""

NAMES_BY_MODULE = {
    # Models: their files, their shapes.
    "models": "materialize",
    "presets": "PRESETS",
    "architectures": "LLAMA_AND_GPT2 LLAMAS restore_dropout",
    # Batches: rows of tokens; samples for data parallelism.
    "documents": "load_rows one_by_one",
    "batches": "Batches batches_of check_partitions gather_batch pad read_samples start_worker",
}
