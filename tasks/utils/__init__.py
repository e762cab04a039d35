"""What techniques are made of: collectives, slices of weights, the seam to Hugging Face.

It imports torch and transformers, no script, and one of the packages beside it, `guards`:

    guards          raise where a split model would be silently wrong; loaded when one is split
    harness         starts and ends a job; compares; measures
    loading         models, tokenizers and text
    checkpoints     save a training, to be continued
    shared_memory   how ranks of one machine talk on a CPU
    memory, mesh    more techniques, of Task 5 and of `tp_ulysses.py`

A script's technique imports `utils.<module>` and what it builds on: scripts, `memory`, `mesh`. The
code that checks a technique is loaded only when its script runs: `import harness` loads nothing,
and the first use of `harness.start` loads `harness/job.py`, where `start` is.

Shapes, in the whole repository: B batch, S sequence, H hidden, N query heads, K key/value heads,
D head dim, F MLP units, V vocabulary, P ranks. Local sizes are written S/P, N/P and so on, also
where the shares are uneven. A tensor has dims, a mesh has axes. "Sequence parallel" is torchtitan's
context parallel (Ulysses, ring); Megatron's sequence parallelism is in `mesh/megatron_sp.py`.
"""

from importlib import import_module


def load_when_used(package):
    """Return a package's `__getattr__`: a name's first use loads its module, found in names.py.

    So a script can `import harness` at its top, and importing its technique loads none of it.
    """

    def load(name):
        modules = import_module(f"{package}.names").NAMES_BY_MODULE
        for module, names in modules.items():
            if name in names.split():
                return getattr(import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
