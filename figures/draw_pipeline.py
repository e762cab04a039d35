"""Draw what figures/pipeline.py has measured: throughput by schedule, and timelines."""

import statistics

import matplotlib.pyplot as plt

from canvas import finish
from draw_data import draw_times

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"]  # Okabe and Ito's
MARKS = "osD^vx"
WORK = {"F": ("forward", "#56B4E9"), "B": ("backward", "#E69F00"), "W": ("of weights", "#009E73")}


def draw_pipeline(data, path):
    """Left, how many times as fast as plain model parallelism; right, what each rank does when.

    And beside it pipeline_times.png: seconds and throughput, as the course wants them.
    """
    results, ranks = data["results"], data["world_size"]
    seconds, lines = results["step_s"], results["timelines"]
    plain = seconds["plain model parallelism"]
    counts = sorted({int(name.split(", ")[1]) for name in seconds if name[-1].isdigit()})
    figure, (speed, when) = plt.subplots(1, 2, figsize=(11, 5), width_ratios=(4, 6))
    for schedule, colour, mark in zip(lines, COLOURS, MARKS, strict=True):
        ratios = [
            statistics.median(
                a / b for a, b in zip(plain, seconds[f"{schedule}, {m}"], strict=True)
            )
            for m in counts
        ]
        speed.plot(counts, ratios, mark, color=colour, label=schedule, ls="-", lw=1)
    ideal = [results["work"] * m / (m + ranks - 1) for m in counts]
    speed.plot(counts, ideal, "k--", lw=1, label="the bubble's formula")
    speed.axhline(1, color="gray", lw=1)
    speed.set(
        xscale="log", xlabel="microbatches", ylabel="times as fast as plain model parallelism"
    )
    speed.set_xticks(counts, [str(m) for m in counts])
    speed.minorticks_off()
    speed.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.45, 1))
    for row, (schedule, of_ranks) in enumerate(lines.items()):
        for rank, log in enumerate(of_ranks):
            y = row * (ranks + 0.6) + rank
            for kind, number, begin, end in log:
                when.barh(y, end - begin, 0.85, begin, color=WORK[kind][1], ec="white", lw=0.4)
                when.text((begin + end) / 2, y, number, ha="center", va="center", fontsize=6)
            when.text(-0.01, y, f"{schedule}, rank {rank}", ha="right", va="center", fontsize=8,
                      transform=when.get_yaxis_transform())  # fmt: skip
    when.invert_yaxis()
    when.set_yticks([])
    when.set(xlabel="seconds of a step", xlim=(0, None))
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=colour, label=name) for name, colour in WORK.values()
    ]
    when.legend(
        handles=handles, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.09)
    )
    what, more = f"{data['model']}, {ranks} ranks", data | data["versions"] | results
    finish(figure, (speed, when), what, more, path)
    middle = counts[len(counts) // 2]
    shown = {"plain model parallelism": plain}
    shown |= {f"{s}, {middle} microbatches": seconds[f"{s}, {middle}"] for s in lines}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    draw_times(axes, shown, dict.fromkeys(shown, results["tokens"]))
    finish(figure, axes, what, more, path.with_name(f"{path.stem}_times.png"))
