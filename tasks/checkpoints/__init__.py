"""Checkpoints of a training, each written whole or not at all.

`import checkpoints` loads nothing, see `harness/__init__.py`.
"""

from utils import load_when_used

ROOMS = {
    "checkpoint": "Checkpoints fingerprint",  # of what one rank has, or all have alike
    "sharded_checkpoint": "ShardedCheckpoints",  # of slices, also for another number of ranks
}
__getattr__ = load_when_used(__name__, ROOMS)
