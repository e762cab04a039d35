"""Which module of this package has the names that scripts use."""

NAMES_BY_MODULE = {
    "checkpoint": "Checkpoints fingerprint",  # for a state that all ranks have alike
    "sharded_checkpoint": "ShardedCheckpoints",  # for a state that is split over the ranks
}
