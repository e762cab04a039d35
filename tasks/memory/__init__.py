"""What saves memory: Task 5's techniques, which `long_sequence.py` puts together; Task 2's loss."""
