"""Task 5's memory techniques (see `long_sequence.py`), and what is around them (`finetune.py`)."""
