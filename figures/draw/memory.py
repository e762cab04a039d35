"""Draw what figures/bench/training_memory.py has measured."""

import matplotlib.pyplot as plt

from figures.draw.canvas import RANKS, finish

PARTS = "gradients", "logits and what the loss makes of them", "the rest"
CONTENDERS = "one process", "TP", "TP + loss parallel"


def draw_memory(data, path):
    """Of each size what tensors hold over a step, and what the peak is made of."""
    profiles, ranks = data["profiles"], data["world_size"]
    width = 5.5 * len(profiles)
    figure, axes = plt.subplots(2, len(profiles), figsize=(width, 6), height_ratios=(3, 2))
    for (over_time, at_peak), profile in zip(axes.T, profiles, strict=True):
        for row, (name, (colour, _)) in enumerate(zip(CONTENDERS, RANKS, strict=False)):
            most = max(profile[name], key=lambda one: one["peak"])
            seconds, sizes = zip(*most["curve"], strict=True)
            label = f"{name}, of {ranks} ranks each" if row else name
            share = [second / seconds[-1] for second in seconds]
            over_time.step(share, [(most["weights"] + size) / 2**30 for size in sizes],
                           where="post", color=colour, lw=1, label=label)  # fmt: skip
            left = 0
            parts = [("weights", most["weights"]), *((part, most[part]) for part in PARTS)]
            for (part, size), (colour, hatch) in zip(parts, RANKS, strict=True):
                at_peak.barh(row, size / 2**30, left=left, color=colour, hatch=hatch, ec="white",
                             label=None if row else part)  # fmt: skip
                left += size / 2**30
        tokens, several = f"{profile['tokens']:,}", profile.get("batch_size", 1) > 1
        if several:
            tokens = f"{profile['batch_size']} x {profile['seq_len']}"
        over_time.set_title(f"{profile['model']}, {tokens} tokens, vocabulary "
                            f"{profile['vocab_size']:,}", fontsize=9)  # fmt: skip
        over_time.set(xlabel="of the step's time", ylabel="GiB of tensors", ylim=0)
        at_peak.invert_yaxis()
        at_peak.set_yticks(range(len(CONTENDERS)), CONTENDERS, fontsize=8)
        at_peak.set_xlabel("GiB at the peak")
    # Below the pictures, where no curve is.
    axes[1][0].legend(fontsize=7, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.3))
    handles, labels = axes[0][0].get_legend_handles_labels()
    axes[1][-1].legend(handles, labels, fontsize=7, ncols=3, loc="upper right",
                       bbox_to_anchor=(1, -0.3))  # fmt: skip
    finish(figure, axes.flatten(), "a training step, forward, backward and SGD",
           data | data["versions"], path)  # fmt: skip
