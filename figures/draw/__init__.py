"""Pictures of records, by matplotlib: `python -m figures.draw`.

kinds.py says what draws which record; canvas.py has what all pictures share.
"""
