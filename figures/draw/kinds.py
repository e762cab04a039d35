"""What draws which record, and the pictures of those that no other file here draws."""

import statistics

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from figures import FIGURES, RECORDS
from figures.bench.claims import TASK
from figures.draw.canvas import finish
from figures.draw.data import draw_data_parallel, draw_worker_speed
from figures.draw.diagrams import draw_diagrams
from figures.draw.memory import draw_memory
from figures.draw.mesh_diagrams import draw_mesh_diagrams
from figures.draw.pipeline import draw_pipeline, draw_thread_speed
from figures.draw.pretraining import draw_pretraining_loss
from figures.draw.techniques import draw_techniques
from figures.draw.timeline import draw_timeline

# Okabe and Ito's colours, which colour-blind readers can tell apart; hatches for print.
STYLE = {
    "hand-made": ("by hand (Task 2)", "#0072B2", ""),
    "DTensor": ("DTensor plan (Task 3)", "#E69F00", "//"),
    "transformers": ("transformers, tp_plan", "#009E73", ".."),
}


def seconds(record, side):
    """{phase: [s, ...]} of the single process or the ranks, with the sum of both halves."""
    phases = dict(record["results"][side])
    phases["forward + backward"] = [
        a + b for a, b in zip(phases["forward"], phases["backward"], strict=True)
    ]
    return phases


def draw_tp_speed(data, path):
    """Bars: median seconds of the slowest rank, with the spread; lines: the single process."""
    runs = data["runs"]
    lengths = sorted({run["seq_len"] for run in runs})
    panels = [(phase, length) for length in lengths for phase in ("forward", "forward + backward")]
    panels.append(("generate", lengths[0]))
    figure, axes = plt.subplots(2, (len(panels) + 1) // 2, figsize=(10, 6.4))
    axes = list(axes.flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (phase, length) in zip(axes, panels, strict=False):
        here = [run for run in runs if run["seq_len"] == length]
        ranks = sorted({run["world_size"] for run in here})
        layers = {str(run["results"]["num_layers"]) for run in here}
        for run in here:
            place = ranks.index(run["world_size"])
            technique = run["technique"].removesuffix(", gloo")
            _, colour, hatch = STYLE[technique]
            ours, single = (seconds(run, side)[phase] for side in ("parallel", "single"))
            middle, alone = statistics.median(ours), statistics.median(single)
            x = place + 0.27 * (list(STYLE).index(technique) - 1)
            if technique != run["technique"]:
                axis.plot(x, middle, "kx")
                continue
            axis.bar(
                x, middle, 0.25, color=colour, hatch=hatch, edgecolor="white",
                yerr=[[middle - min(ours)], [max(ours) - middle]],
                error_kw={"elinewidth": 1, "capsize": 2},
            )  # fmt: skip
            axis.plot([x - 0.13, x + 0.13], [alone, alone], color="black", linewidth=2)
        axis.set_xlim(-0.55, len(ranks) - 0.45)
        axis.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axis.set_xlabel("ranks")
        axis.set_ylabel("seconds")
        title = f"{phase}, {length} tokens, {' or '.join(sorted(layers))} layers"
        if phase == "generate":
            title = f"{data['new_tokens']} cached tokens after {data['prompt_tokens']}"
        axis.set_title(title, fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour, hatch=hatch, ec="white", label=name)
               for name, colour, hatch in STYLE.values()]  # fmt: skip
    handles += [plt.Line2D([], [], color="black", linewidth=2, label="one process, the same cores")]
    if any("gloo" in run["technique"] for run in runs):
        handles += [plt.Line2D([], [], color="black", marker="x", ls="", label="by gloo")]
    figure.legend(handles=handles, loc="lower right", bbox_to_anchor=(0.98, 0.15), frameon=False)
    finish(figure, axes, data["model"], data, path)


def draw_collectives(data, path):
    """Microseconds of a sum by its size, median: a panel for each number of ranks."""
    ranks = sorted({run["world_size"] for run in data["runs"]})
    figure, axes = plt.subplots(1, len(ranks), figsize=(5 * len(ranks), 3.8), sharey=True)
    styles = {"gloo": ("#E69F00", "s-"), "shared memory": ("#0072B2", "o-")}
    for axis, P in zip(axes, ranks, strict=True):
        runs = sorted((run["sum_bytes"], run["sum_s"]) for run in data["runs"]
                      if run["world_size"] == P)  # fmt: skip
        for name, (colour, mark) in styles.items():
            sizes, medians = zip(*((size, 1e6 * laps[name]["median"])
                                   for size, laps in runs), strict=True)  # fmt: skip
            axis.plot(sizes, medians, mark, color=colour, label=name)
            for size, median in zip(sizes, medians, strict=True):
                axis.annotate(f"{median:,.0f}", (size, median), (0, 6), fontsize=8, ha="center",
                              textcoords="offset points")  # fmt: skip
        axis.set(xscale="log", yscale="log", title=f"{P} ranks", xlabel="size of a sum")
        names = [f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB" for size in sizes]
        axis.set_xticks(sizes, names, fontsize=8)
        axis.minorticks_off()
    axes[0].set_ylabel("microseconds, median")
    axes[0].legend(frameon=False)
    finish(figure, axes, "an all-reduce, one thread a rank", data, path)


def draw_longest(data, path):
    """The longest length of each contender on one rank; of ours by ranks; bytes a token."""
    runs = [run for run in data["runs"] if run["found"]]
    budgets = sorted({run["budget_mib"] for run in runs})
    colours = dict(zip(budgets, ("#E69F00", "#0072B2", "#009E73"), strict=False))
    marks = dict(zip(budgets, "os^", strict=False))
    figure, (alone, lines, dots) = plt.subplots(
        1, 3, figsize=(13, 4), gridspec_kw={"width_ratios": [1.5, 1, 1]}
    )
    names = list(dict.fromkeys(run["contender"] for run in runs))
    for run in runs:
        if run["world_size"] == 1:
            at, budget = names.index(run["contender"]), run["budget_mib"]
            alone.plot(run["found"], at, marks[budget], color=colours[budget])
            alone.text(run["found"] * 1.1, at, f"{run['found']:,}", va="center", fontsize=8)
    alone.set(xscale="log", xlabel="longest sequence, positions", title="one rank")
    alone.set_xlim(right=max(run["found"] for run in runs) * 2.5)
    alone.set_yticks(range(len(names)), names)
    alone.grid(axis="y", linewidth=0.5)
    alone.invert_yaxis()
    for budget in budgets:
        ours = sorted(
            (run["world_size"], run["found"], run["estimate"]) for run in runs
            if run["budget_mib"] == budget and run["contender"] == "ours"
        )  # fmt: skip
        ranks, found, estimates = zip(*ours, strict=True)
        lines.plot(ranks, found, f"{marks[budget]}-", color=colours[budget],
                   label=f"limit {budget} MiB a rank")  # fmt: skip
        lines.plot(ranks, estimates, "kx", label="estimate" if budget == budgets[-1] else None)
    lines.set(xscale="log", yscale="log", xlabel="ranks", ylabel="longest sequence, positions",
              title="ours, on more ranks")  # fmt: skip
    lines.set_xticks([1, 2, 4], ["1", "2", "4"])
    ticks = [run["found"] for run in runs if run["contender"] == "ours"]
    lines.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    lines.minorticks_off()
    lines.legend(frameon=False, loc="upper center", fontsize=8)
    for run in runs:
        dots.plot(run["predicted_bytes"] / 1024, run["measured_bytes"] / 1024,
                  marks[run["budget_mib"]], color=colours[run["budget_mib"]],
                  mfc="none")  # fmt: skip
    dots.plot([10, 1000], [10, 1000], color="black", linewidth=1)
    dots.set(xscale="log", yscale="log", xlabel="KiB a token, computed",
             ylabel="KiB a token, measured", title="memory of every contender")  # fmt: skip
    finish(figure, (alone, lines, dots), f"{data['model']}, prompt tuning", data, path)


def draw_checks(data, path):
    """Of each claim of each task, the worst difference and what is allowed, in both dtypes."""
    rows = [
        (task, claim, {dtype: claims[claim] for dtype, claims in of.items()})
        for task, of in data["tasks"].items() for claim in of["float64"]
    ]  # fmt: skip
    figure, axis = plt.subplots(figsize=(9.5, 0.24 * len(rows) + 1.6))
    nothing, styles = 1e-18, {"float64": ("#0072B2", "o", -0.13), "float32": ("#E69F00", "s", 0.13)}
    for dtype, (colour, shape, aside) in styles.items():
        y = [at + aside for at in range(len(rows))]
        measured = [max(of[dtype]["measured"], nothing) for _, _, of in rows]
        allowed = [of[dtype]["allowed"] or float("nan") for _, _, of in rows]
        axis.plot(measured, y, shape, color=colour, ms=5, label=f"{dtype}, largest difference")
        axis.plot(allowed, y, "|", color=colour, ms=8, mew=2, zorder=4, label=f"{dtype}, allowed")
    axis.set_xscale("log")
    axis.set_xlim(nothing / 3, 1)
    powers = range(-15, 1, 5)
    labels = ["the same\nbits", *(f"$10^{{{power}}}$" for power in powers)]
    axis.set_xticks([nothing, *(10.0**power for power in powers)], labels)
    axis.set_xlabel("largest difference / largest value of the reference")
    starts = [y for y, row in enumerate(rows) if y == 0 or row[0] != rows[y - 1][0]]
    names = [
        f"{TASK[task][0]}: {claim}" if y in starts else claim
        for y, (task, claim, _) in enumerate(rows)
    ]
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    for y in starts[1:]:
        axis.axhline(y - 0.5, color="0.8", linewidth=0.8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.legend(loc="upper center", bbox_to_anchor=(0.3, -0.06), ncols=2, frameon=False, fontsize=8)
    finish(figure, [axis], f"model {data['model']}", data | data["versions"], path)


LONG = {  # contenders of long_speed.py on one rank: the figure's words, colours and hatches
    "checkpointing, tiled loss and MLP": ("checkpointing,\ntiled loss, MLP", "0.6", ""),
    "selective checkpoint, tiled loss and MLP": ("but for\nattention", "#009E73", "xx"),
    "long_sequence.py": ("ours,\none process", "#E69F00", ".."),
}


def draw_sequence_speed(data, path):
    """Task 4: seconds and memory of a step; Task 5: seconds of a long step. Data: of both files."""
    forward, long = data["ulysses_speed"], data["long_speed"]
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.8), gridspec_kw={"width_ratios": [1.3, 1, 1.3]}
    )
    results, ranks = forward["results"], forward["world_size"]
    sides = {"single": ("one process", "0.6", ""), "parallel": (f"{ranks} ranks", "#0072B2", "//")}
    for at, (side, (name, colour, hatch)) in enumerate(sides.items()):
        laps = [results[f"{side}_{phase}_s"] for phase in ("forward", "backward")]
        bars(axes[0], [at - 0.5 + 3 * i for i in range(2)], laps, colour, hatch, name)
        peaks = results[f"{side}_peak_memory_bytes"]
        peaks = [max(peaks) if isinstance(peaks, list) else peaks]
        bars(axes[1], [at], [[peak / 2**30] for peak in peaks], colour, hatch, None)
    axes[0].set_xticks([0, 3], ["forward", "backward"])
    axes[0].legend(frameon=False)
    axes[0].set(ylabel="seconds", title="Task 4, a step of 4,096 tokens")
    axes[1].set_xticks([0, 1], [name for name, _, _ in sides.values()])
    axes[1].set(ylabel="GiB", title="peak memory of a process")
    steps = {name: of["step_s"] for name, of in long["results"].items() if "step_s" in of}
    names = []
    for at, (name, laps) in enumerate(steps.items()):
        short, colour, hatch = LONG.get(name, (f"ours,\n{ranks} ranks", "#0072B2", "//"))
        bars(axes[2], [at], [laps], colour, hatch, None)
        names.append(short)
    axes[2].set_xticks(range(len(steps)), names, fontsize=8)
    axes[2].set(ylabel="seconds", title="Task 5, a step of 16,384 positions")
    what = f"left: {forward['model']}, 4 layers; right: {long['model']}"
    finish(figure, axes, what, forward | forward["versions"] | results, path)


def bars(axis, places, laps, colour, hatch, label):
    """Medians, with the least and the most."""
    for place, values in zip(places, laps, strict=True):
        middle = statistics.median(values)
        axis.bar(place, middle, 0.9, color=colour, hatch=hatch, edgecolor="white", label=label,
                 yerr=[[middle - min(values)], [max(values) - middle]],
                 error_kw={"elinewidth": 1, "capsize": 2})  # fmt: skip
        label = None


def draw_gpu(data, records, path):
    """One GPU: the longest sequence of each contender; when each layer of a long step was done.

    data: gpu.json. records: of its parts.
    """
    longest = [run for record in records for run in record.get("runs", []) if "found" in run]
    steps = [record for record in records if "done_s" in record]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = [f"{run['contender']}\nin {run['budget_mib']} MiB" for run in longest]
    found = [run["found"] for run in longest]
    left.bar_label(left.barh(names, found, color="#0072B2"), [f" {n:,}" for n in found], fontsize=8)
    left.invert_yaxis()
    left.margins(x=0.2)
    left.set(xlabel="positions", title="longest sequence, prompt tuning, one step")
    for record in steps:
        done = [at for layers in record["done_s"].values() for at in layers]
        name = f"{record['positions']:,} positions{', offload' * record['offload']}"
        (line,) = right.plot(done, range(1, len(done) + 1), ".-", label=name)
        if record["extrapolated"]:
            right.plot(record["step_s"], 2 * record["layers"], "x", color=line.get_color())
    right.set(xscale="log", xlabel="seconds; x: extrapolated", title="a step, layer by layer",
              ylabel="layers done, forward and backward")  # fmt: skip
    right.xaxis.set_minor_formatter(NullFormatter())
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    if steps:
        right.legend(frameon=False, fontsize=8)
    finish(figure, (left, right), "make gpu", data, path)


FILES = ("report", "tp_speed", "longest", "collectives", "diagrams", "mesh_diagrams", "pipeline",
         "thread_speed", "data_parallel", "worker_speed", "training_memory", "ring_speed_2",
         "pretraining_loss", "estimate")  # fmt: skip


def picture_of(file):
    """Where the picture of a record goes: beside it, of those in figures/records/ into figures/."""
    folder = FIGURES if file.resolve().parent == RECORDS else file.parent
    return folder / f"{file.stem}.png"


def kind(data):
    """What draws these records."""
    if "tasks" in data:
        return draw_checks
    if "profiles" in data:
        return draw_memory
    if "workers" in data:
        return draw_worker_speed
    if "modes" in data:
        return draw_thread_speed
    if "ring" in data.get("results", {}):
        return draw_mesh_diagrams
    if "sizes" in data.get("results", {}):
        return draw_diagrams
    if "timelines" in data.get("results", {}):
        return draw_pipeline
    if "hops" in data.get("results", {}):
        return draw_timeline
    if "techniques" in data.get("results", {}):
        return draw_techniques
    if "memory_bytes" in data.get("results", {}):
        return draw_data_parallel
    if "runs" not in data:
        raise ValueError(f"not one of {', '.join(FILES)}")
    if "float32" in data["runs"]:
        return draw_pretraining_loss
    if any("sum_s" in run for run in data["runs"]):
        return draw_collectives
    return draw_tp_speed if "prompt_tokens" in data else draw_longest
