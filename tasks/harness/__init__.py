"""What starts a task, checks it and measures it. No technique uses it.

Start and end a job:    job, flags, environment, processes, watchdog
Compare:                checks, tolerance, wider, float64, generation, *_checks (by kind of task)
Measure:                measure, memory_profile, budget
Around the training:    epochs, gradient_files, finetune, pretraining

`import harness` loads none of them; the first use of `harness.start` loads its module, by names.py.
"""

from utils import load_when_used

__getattr__ = load_when_used(__name__)
