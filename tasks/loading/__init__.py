"""Models, tokenizers and text, loaded as `harness` is.

Models:     models (files), presets and architectures (shapes), smollm2 (trained, from a package)
Text:       text, text_files (large ones), bpe (a tokenizer trained on it)
Batches:    documents (rows of tokens), batches (samples)
"""

from utils import load_when_used

__getattr__ = load_when_used(__name__)
