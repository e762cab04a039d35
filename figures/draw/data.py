"""Draw what figures/bench/data_speed.py and figures/bench/worker_speed.py have measured."""

import statistics

import matplotlib.pyplot as plt

from figures.bench.worker_speed import metrics
from figures.draw.canvas import RANKS, finish

PARTS = "weights", "gradients", "Adam's states", "kept for the backward"


def draw_times(axes, seconds, tokens):
    """Seconds of a step, and tokens a second; bars to the median, lines from least to largest.

    seconds: {contender: [s, ...]}. tokens: {contender: of all ranks, in a step}.
    """
    for axis, title in zip(axes, ("seconds of a step", "tokens a second"), strict=True):
        for row, (name, laps) in enumerate(seconds.items()):
            values = [tokens[name] / s for s in laps] if title.startswith("tokens") else laps
            middle = statistics.median(values)
            around = [[middle - min(values)], [max(values) - middle]]
            axis.barh(row, middle, color=RANKS[row > 0][0], xerr=around, ecolor="#555555")
            axis.text(0, row, f" {middle:,.4g}", va="center", color="white", fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(seconds)), seconds if axis is axes[0] else [], fontsize=8)


def draw_data_parallel(data, path):
    """Time, throughput, and the memory of a rank, by strategy."""
    results, ranks = data["results"], data["world_size"]
    seconds = dict(sorted(results["step_s"].items(), key=lambda item: item[0] != "one process"))
    tokens = {name: results["tokens"] * (1 if name == "one process" else ranks) for name in seconds}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), width_ratios=(3, 3, 4))
    draw_times(axes[:2], seconds, tokens)
    for row, everyone in enumerate(results["memory_bytes"].values()):
        left = 0
        for part, (label, (colour, hatch)) in enumerate(zip(PARTS, RANKS, strict=True)):
            size = max(numbers[part] for numbers in everyone) / 2**20
            axes[2].barh(row, size, left=left, color=colour, hatch=hatch, ec="white",
                         label=label if row == 0 else None)  # fmt: skip
            left += size
    axes[2].invert_yaxis()
    axes[2].set_title(f"MiB on each of {ranks} ranks", fontsize=9)
    axes[2].set_yticks(range(len(results["memory_bytes"])), results["memory_bytes"], fontsize=8)
    axes[2].legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    what = f"data parallelism, {data['model']}, {ranks} ranks"
    finish(figure, axes, what, data | data["versions"] | results, path)


def draw_worker_speed(data, path):
    """Two figures, one a metric of the course: path with _time and with _tokens in its name."""
    of = {int(workers): metrics(jobs) for workers, jobs in data["workers"].items()}
    least, cores = min(of), data["machine"]["cores"]
    titles = {"time": "training time of an epoch, seconds", "tokens": "tokens per second"}
    for place, (name, title) in enumerate(titles.items()):
        figure, axis = plt.subplots(figsize=(9, 4))
        alone = statistics.mean(of[least][place])
        for x, (workers, both) in enumerate(of.items()):
            values = both[place]
            spread = statistics.stdev(values) if len(values) > 1 else 0
            axis.bar(x, statistics.mean(values), 0.6, color=RANKS[0][0], yerr=spread, capsize=4,
                     ecolor="#555555")  # fmt: skip
            axis.text(x, 0, f"{statistics.mean(values):,.4g} \u00b1 {spread:,.2g}", ha="center",
                      va="bottom", color="white")  # fmt: skip
            times = workers / least if data["machine"]["gpus"] else min(workers, cores) / least
            ideal = alone / times if name == "time" else alone * times
            axis.plot([x - 0.3, x + 0.3], [ideal, ideal], "k--",
                      label="perfect scaling" if x == 0 else None)  # fmt: skip
        labels = [f"{w} worker{'s' * (w > 1)}, batch {w * data['batch_size']}" for w in of]
        on = "one GPU each" if data["machine"]["gpus"] else f"{cores} cores, one thread each"
        axis.set_xticks(range(len(of)), labels)
        axis.set(title=title, xlabel=f"mean and standard deviation of epochs; {on}")
        axis.legend(frameon=False)
        what = f"data parallelism, {data['model']}, {data['seq_len']} tokens"
        finish(figure, [axis], what, data | data["versions"],
               path.with_name(f"{path.stem}_{name}.png"))  # fmt: skip
