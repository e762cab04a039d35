"""What `tp_ulysses.py` can use on its mesh besides tensor parallelism and Ulysses."""
