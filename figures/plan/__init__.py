"""What a training step takes in memory and in bytes sent, in closed form: nothing is run.

formulas.py        what a layer keeps, and when a step holds most
techniques.py      what each technique makes of that
longest.py         the longest sequence under a limit on memory
estimate.py        the program: `make estimate`
estimate_check.py  the formulas held against steps that are run
"""
