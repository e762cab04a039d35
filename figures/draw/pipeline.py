"""Draw throughput by schedule, and timelines, of figures/bench/pipeline.py; and training by epochs,
without and with a pipeline, of figures/bench/thread_speed.py.
"""

import statistics

import matplotlib.pyplot as plt

from figures.bench.thread_speed import metric
from figures.draw.canvas import RANKS, finish
from figures.draw.data import draw_times

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


METRICS = {  # in the file's name: (in the record, title)
    "time": ("training_time_s", "training time of an epoch, seconds"),
    "tokens": ("tokens_per_second", "tokens per second"),
}


def draw_thread_speed(data, path):
    """Two figures, one a metric of the course: path with _time and with _tokens in its name."""
    for name, (key, title) in METRICS.items():
        figure, axis = plt.subplots(figsize=(6.4, 4))
        values = {mode: metric(data, mode, key) for mode in data["modes"]}
        first = next(iter(values.values()))
        for x, (of_mode, (colour, hatch)) in enumerate(zip(values.values(), RANKS, strict=False)):
            middle = statistics.median(of_mode)
            around = [[middle - min(of_mode)], [max(of_mode) - middle]]
            axis.bar(x, middle, 0.6, color=colour, hatch=hatch, ec="white", yerr=around, capsize=4,
                     ecolor="#555555")  # fmt: skip
            times = statistics.median(b / a for a, b in zip(first, of_mode, strict=True))
            of_first = f"\n{times:.2f} of the first" if x else ""
            axis.text(x, 0, f"{middle:,.4g}{of_first}", ha="center", va="bottom", fontsize=9,
                      bbox={"fc": "white", "ec": "none", "pad": 1.5})  # fmt: skip
        on = "GPUs" if data["machine"]["gpus"] else "threads on CPU cores"
        axis.set_xticks(range(len(values)), values)
        axis.set(title=title, xlabel=f"median of {len(first)} epochs, least and largest; "
                 f"{data['threads']} {on}")  # fmt: skip
        what = (f"{data['model']}, batch {data['batch_size']} of {data['seq_len']} tokens,\n"
                f"microbatches of {data['split_size']}")  # fmt: skip
        finish(figure, [axis], what, data | data["versions"],
               path.with_name(f"{path.stem}_{name}.png"))  # fmt: skip
