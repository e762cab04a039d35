"""Plumbing that the task scripts share. A technique is in the script whose task asks for it.

Scripts import from `utils.<module>`, from `memory` (Task 5), and from the scripts that they build
on. Nothing in here imports a script, and nothing is re-exported: each name is imported from the
module that defines it.

`job` starts a script and ends its process; `environment` and `watchdog` are its helpers. All other
functions take values, not parsed flags, and a `Run`, which says where they run.

Shapes, in the whole repository: B batch, S sequence, H hidden, N query heads, K key/value heads,
D head dim, F MLP units, V vocabulary, P ranks. Local sizes are written S/P, N/P and so on, also
where the shares are uneven. A tensor has dims, a mesh has axes.
"""
