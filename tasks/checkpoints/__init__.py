"""Checkpoints of a training, each written whole or not at all.

checkpoint:             a state that all ranks have alike: rank 0 writes it
sharded_checkpoint:     a state that is split: each rank writes its slices, any ranks read them

`import checkpoints` loads neither; the first use of a name loads its module, by names.py.
"""

from utils import load_when_used

__getattr__ = load_when_used(__name__)
