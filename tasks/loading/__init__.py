"""Models, tokenizers and text.

Models:     models (files), presets and architectures (shapes), smollm2 (trained, from a package)
Text:       text, text_files (large ones), bpe (a tokenizer trained on it)
Batches:    documents (rows of tokens), batches (samples)

`import loading` loads none of them; the first use of a name loads its module, by names.py.
"""

from utils import load_when_used

__getattr__ = load_when_used(__name__)
