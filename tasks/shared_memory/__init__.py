"""A process group for the ranks of one machine, on a CPU.

slots:      memory that the ranks share, and how they wait for each other
group:      PyTorch's collectives on it; importing it registers the backend
traffic:    the bytes that a rank sends, by any backend
"""
