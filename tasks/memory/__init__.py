"""Task 5's memory techniques: `long_sequence.py` puts them together."""
