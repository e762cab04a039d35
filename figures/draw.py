"""Draw the figures from the measurements beside this file.

python figures/draw.py                # figures/tp_speed.json, into figures/tp_speed.png
python figures/draw.py /tmp/mine.json # into /tmp/mine.png
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
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[-1].get_legend_handles_labels()
    line = plt.Line2D([], [], color="black", linewidth=2)
    figure.legend(
        [*handles, line], [*labels, "one process, as many threads"],
        loc="lower center", ncols=len(labels) + 1, frameon=False,
    )  # fmt: skip
    layers, machine = data["num_layers"], data["machine"]
    versions = data["runs"][0]["versions"]
    figure.suptitle(
        f"{data['model']}, {layers} layers, {data['dtype']}; {machine['cores']} cores of "
        f"{machine['cpu']}; torch {versions['torch']}, transformers {versions['transformers']}",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = HERE / "tp_speed.json"
    parser.add_argument("file", nargs="?", type=Path, default=default, help="default %(default)s")
    file = parser.parse_args().file
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{file}: {error}")
    draw_tp_speed(data, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
