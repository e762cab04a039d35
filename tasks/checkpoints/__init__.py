"""Checkpoints of a training, each written whole or not at all; loaded as `harness` is.

checkpoint:             of what one rank has, or all ranks have alike
sharded_checkpoint:     of slices, which another number of ranks can read
"""

from utils import load_when_used

__getattr__ = load_when_used(__name__)
