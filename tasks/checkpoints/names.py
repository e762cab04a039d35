"""Which module of this package has the names that scripts use."""

ROOMS = {
    "checkpoint": "Checkpoints fingerprint",  # for a state that all ranks have alike
    "sharded_checkpoint": "ShardedCheckpoints",  # for a state that is split over the ranks
}
