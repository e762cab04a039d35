"""The bytes that tensors hold while a function runs, from events that torch.profiler records."""

import gzip
import json
import os

from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from utils.errors import UserError

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints no lines of its own
POINTS = 400  # points that are kept of a curve
# The parts of a step's peak.
PARTS_OF_PEAK = "gradients", "logits and what the loss makes of them", "the rest"


def record_memory(function, device):
    """Record what function() allocates on `device`, without what was there before.

    Returns the bytes over time, [(seconds, bytes), ...], the blocks at the peak, {address: bytes},
    and the profiler's own record, for `write_trace`. Only what PyTorch's allocator gives counts:
    tensors, not memory that kernels take by themselves.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, profile_memory=True) as recorded:
        function()
    blocks, at_peak, curve = {}, {}, []
    total = peak = 0
    for event in sorted(allocations(recorded, device), key=lambda event: event.start_time_ns):
        change = event.extra_fields
        if change.alloc_size > 0:
            blocks[change.ptr] = change.alloc_size
            total += change.alloc_size
        else:
            total -= blocks.pop(change.ptr, 0)  # 0: it was there before
        curve.append((event.start_time_ns, total))
        if total > peak:
            peak, at_peak = total, dict(blocks)
    return thinned(curve), at_peak, recorded


def allocations(recorded, device):
    """Yield an event for each block that is given or taken back.

    (`export_memory_timeline` reads them, too; but PyTorch is about to drop it.)
    """
    # The events are in the profiler's tree of what ran, which PyTorch itself reads in this way.
    left = list(recorded.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == device.type:
            yield event


def thinned(curve):
    """Return a curve [(ns, bytes), ...] in seconds from its start, thinned to about POINTS points.

    Each is the largest value in its part of the time.
    """
    first, last = curve[0][0], curve[-1][0]
    width, largest = (last - first) / POINTS or 1, {}
    for time, total in curve:
        part = int((time - first) / width)
        largest[part] = max(largest.get(part, 0), total)
    return [(part * width / 1e9, total) for part, total in largest.items()]


def record_step(model, ids, columns):
    """Take a step of SGD; record its loss, and the bytes of tensors over time and at the peak.

    columns: how many columns of the vocabulary this rank's logits have. Returns a dict, with the
    peak's bytes by PARTS_OF_PEAK, and the profiler's record, for `write_trace`.
    """
    parameters, losses = list(model.parameters()), []

    def step():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        SGD(parameters, lr=0.01).step()
        losses.append(loss.item())

    curve, blocks, recorded = record_memory(step, ids.device)
    weights = sum(parameter.nbytes for parameter in parameters)
    gradients = {(p.grad.data_ptr(), p.grad.nbytes) for p in parameters}
    alike = {p.nbytes for p in parameters if p.nbytes > 2**20}  # gradients not yet added to .grad
    parts = dict.fromkeys(PARTS_OF_PEAK, 0)
    for address, size in blocks.items():
        values = size / (ids.numel() * columns)  # bytes a logit; less if a shift drops a row
        if (address, size) in gradients or size in alike:
            parts[PARTS_OF_PEAK[0]] += size
        elif any(0.98 * width < values < 1.01 * width for width in (2, 4, 8)):
            parts[PARTS_OF_PEAK[1]] += size
        else:
            parts[PARTS_OF_PEAK[2]] += size
    peak = sum(blocks.values())
    record = parts | {"loss": losses[0], "weights": weights, "peak": peak, "curve": curve}
    return record, recorded


def trace_of(path, name):
    """Return the file of one of several traces: trace.TP.json for trace.json and the name TP."""
    stem, dot, suffix = path.name.partition(".")
    return path.with_name(f"{stem}.{name.replace(' + ', '_').replace(' ', '_')}{dot}{suffix}")


def write_trace(recorded, path):
    """Write the profiler's record as a Chrome trace (JSON; .gz: compressed), whole or not at all.

    Raises UserError where it cannot be written.
    """
    part = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        recorded.export_chrome_trace(str(part))
        with (gzip.open if path.suffix == ".gz" else open)(part, "rt") as file:
            json.load(file)  # on a full disk the profiler says nothing, and writes a part
        part.replace(path)
    except (OSError, ValueError, EOFError) as error:
        part.unlink(missing_ok=True)
        raise UserError(f"--trace {path}: cannot be written there ({error})") from error
