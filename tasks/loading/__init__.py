"""Models, tokenizers and text. `import loading` loads nothing, see `harness/__init__.py`.

Beside what scripts use: smollm2 is a trained model out of a package, text and text_files read
texts, and bpe trains a tokenizer.
"""

from utils import load_when_used

ROOMS = {
    # Models: their files, their shapes.
    "models": "materialize",
    "presets": "PRESETS",
    "architectures": "ALL_FAMILIES restore_dropout",
    # Batches: rows of tokens; samples for data parallelism.
    "documents": "load_rows one_by_one",
    "batches": "Batches batches_of check_partitions gather_batch pad read_samples start_worker",
}
__getattr__ = load_when_used(__name__, ROOMS)
