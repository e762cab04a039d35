"""What `tp_ulysses.py` can use on its mesh beside tensor parallelism and Ulysses."""
