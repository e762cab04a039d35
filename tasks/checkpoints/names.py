"""Which module of this package has the names that scripts use."""

ROOMS = {
    "checkpoint": "Checkpoints fingerprint",  # of what one rank has, or all have alike
    "sharded_checkpoint": "ShardedCheckpoints",  # of slices, also for another number of ranks
}
