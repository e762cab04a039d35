"""Draw the loss of each step in both dtypes, of figures/bench/pretraining_loss.py."""

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from figures.draw.canvas import RANKS, finish


def draw_pretraining_loss(data, path):
    """A line a dtype, and what lies between the two."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    curves = {dtype: run["losses"] for dtype, run in data["runs"].items()}
    for (dtype, losses), (colour, _), style in zip(
        curves.items(), RANKS, ("-", "--"), strict=False
    ):
        held = data["runs"][dtype]["held_out_loss"]
        label = f"{dtype}; held out, at the end: {held:.2f}"
        axes[0].plot(range(len(losses)), losses, style, color=colour, label=label)
    axes[0].set_ylabel("loss of the step's batch")
    axes[0].legend(fontsize=7)
    apart = [low - full for low, full in zip(curves["bfloat16"], curves["float32"], strict=True)]
    axes[1].axhline(0, color="#888888", linewidth=0.8)
    axes[1].plot(range(len(apart)), apart, color="black")
    axes[1].set_ylabel("bfloat16's loss - float32's")
    for axis in axes:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    what = f"pretraining {data['model']} on 2 x 2 ranks, {data['batch_size']} x {data['seq_len']}"
    finish(figure, axes, f"{what} tokens a step", data, path)
