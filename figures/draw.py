"""Draw the figures from the measurements beside this file.

python figures/draw.py                # tp_speed.json and longest.json, each into a .png
python figures/draw.py /tmp/mine.json # one of the two, into /tmp/mine.png
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
# Okabe and Ito's colours, which colour-blind readers can tell apart; hatches for print.
STYLE = {
    "hand-made": ("#0072B2", ""),
    "DTensor": ("#E69F00", "//"),
    "transformers": ("#009E73", ".."),
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
    figure, axes = plt.subplots(1, len(panels), figsize=(3.3 * len(panels), 3.6))
    for axis, (phase, length) in zip(axes, panels, strict=True):
        here = [run for run in runs if run["seq_len"] == length]
        ranks = sorted({run["world_size"] for run in here})
        for run in here:
            place = ranks.index(run["world_size"])
            colour, hatch = STYLE[run["technique"]]
            ours, single = (seconds(run, side)[phase] for side in ("parallel", "single"))
            middle, alone = statistics.median(ours), statistics.median(single)
            x = place + 0.27 * (list(STYLE).index(run["technique"]) - 1)
            axis.bar(
                x, middle, 0.25, color=colour, hatch=hatch, edgecolor="white",
                yerr=[[middle - min(ours)], [max(ours) - middle]],
                error_kw={"elinewidth": 1, "capsize": 2},
                label=run["technique"] if place == len(ranks) - 1 else None,
            )  # fmt: skip
            axis.plot([x - 0.13, x + 0.13], [alone, alone], color="black", linewidth=2)
        axis.set_xlim(-0.55, len(ranks) - 0.45)
        axis.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axis.set_xlabel("ranks")
        axis.set_ylabel("seconds")
        title = f"{phase}, {length} tokens"
        if phase == "generate":
            title = f"{data['new_tokens']} cached tokens after {data['prompt_tokens']}"
        axis.set_title(title, fontsize=10)
    handles, labels = axes[-1].get_legend_handles_labels()
    line = plt.Line2D([], [], color="black", linewidth=2)
    figure.legend(
        [*handles, line], [*labels, "one process, as many threads"],
        loc="lower center", ncols=len(labels) + 1, frameon=False,
    )  # fmt: skip
    finish(figure, axes, f"{data['model']}, {data['num_layers']} layers", data, path, 0.07)


def finish(figure, axes, what, data, path, bottom=0.0):
    """What all figures have: what was measured and on what, and no frames."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    machine = data["machine"]
    figure.suptitle(
        f"{what}, {data['dtype']}; {machine['cores']} cores of {machine['cpu']}; torch "
        f"{data['torch']}, transformers {data['transformers']}",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def draw_longest(data, path):
    """The longest length of each contender on one rank; of ours by ranks; bytes a token."""
    runs = [run for run in data["runs"] if run["found"]]
    budgets = sorted({run["budget_mib"] for run in runs})
    colours = dict(zip(budgets, ("#E69F00", "#0072B2", "#009E73"), strict=False))
    figure, (bars, lines, dots) = plt.subplots(
        1, 3, figsize=(13, 4), gridspec_kw={"width_ratios": [1.5, 1, 1]}
    )
    names = list(dict.fromkeys(run["contender"] for run in runs))
    for run in runs:
        if run["world_size"] == 1:
            at, budget = names.index(run["contender"]), run["budget_mib"]
            y = at + 0.4 * (budgets.index(budget) - (len(budgets) - 1) / 2)
            bars.barh(y, run["found"], 0.36, color=colours[budget], hatch="//"[: 2 * (y < at)],
                      edgecolor="white")  # fmt: skip
            bars.text(run["found"] * 1.05, y, f"{run['found']:,}", va="center", fontsize=7)
    bars.set(xscale="log", xlabel="longest sequence on one rank, positions")
    bars.set_xlim(right=max(run["found"] for run in runs) * 2)
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    for budget in budgets:
        ours = sorted(
            (run["world_size"], run["found"], run["estimate"]) for run in runs
            if run["budget_mib"] == budget and run["contender"] == "ours"
        )  # fmt: skip
        ranks, found, estimates = zip(*ours, strict=True)
        lines.plot(ranks, found, "o-", color=colours[budget], label=f"{budget} MiB a rank")
        lines.plot(ranks, estimates, "kx", label="estimate" if budget == budgets[-1] else None)
    lines.set(xscale="log", yscale="log", xlabel="ranks", ylabel="longest sequence, positions")
    lines.set_xticks([1, 2, 4], ["1", "2", "4"])
    lines.minorticks_off()
    lines.legend(frameon=False)
    for run in runs:
        filled = run["budget_mib"] == budgets[-1]
        dots.plot(run["predicted_bytes"] / 1024, run["measured_bytes"] / 1024, "o", ms=6,
                  color=colours[run["budget_mib"]], mfc=None if filled else "white")  # fmt: skip
    dots.plot([10, 1000], [10, 1000], color="black", linewidth=1)
    dots.set(xscale="log", yscale="log", xlabel="KiB a token, predicted",
             ylabel="KiB a token, measured at its longest")  # fmt: skip
    finish(figure, (bars, lines, dots), f"{data['model']}, prompt tuning", data, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default those beside this script",
                        default=[HERE / "tp_speed.json", HERE / "longest.json"])  # fmt: skip
    for file in parser.parse_args().files:
        try:
            data = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
        draw = draw_tp_speed if "prompt_tokens" in data else draw_longest
        draw(data, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
