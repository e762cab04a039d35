"""Draw what each rank of a ring does when, as figures/bench/ring_speed.py has recorded it."""

import matplotlib.pyplot as plt

from figures.draw.canvas import SENT, finish

STYLES = {  # what: (colour, hatch, its words)
    "forward": ("#56B4E9", "", "a block's forward; queries, keys"),
    "backward": ("#E69F00", "", "its backward"),
    "way": ("#CCCCCC", "", "a hop's messages, until all came (shared memory: until asked for)"),
    "post": ("#555555", "", "the rank posts them"),
    "wait": (SENT, "////", "the rank waits for them"),
}
LANES = {"forward": 0, "backward": 0, "post": 1, "wait": 1, "way": 2}
NAMES = "kernels", "messages:\nthe rank", "on their way"


def draw_timeline(data, path):
    """A picture a backend: of each rank what it computes, and what is on its way meanwhile."""
    backends, ranks = data["results"]["hops"], data["world_size"]
    figure, axes = plt.subplots(len(backends), 1, figsize=(12, 1 + 1.3 * ranks * len(backends)))
    axes = [axes] if len(backends) == 1 else list(axes)
    for axis, (backend, everyone) in zip(axes, backends.items(), strict=True):
        for rank, log in enumerate(everyone):
            for what, *when, of in log:
                lane(axis, 3.6 * rank + LANES[what], what, *(1e3 * at for at in when), of)
            for place, name in enumerate(NAMES):
                axis.text(-0.005, 3.6 * rank + place, name, ha="right", va="center", fontsize=7,
                          transform=axis.get_yaxis_transform())  # fmt: skip
            axis.text(-0.075, 3.6 * rank + 1, f"rank {rank}", ha="right", va="center",
                      fontweight="bold", transform=axis.get_yaxis_transform())  # fmt: skip
        axis.invert_yaxis()
        axis.set_yticks([])
        axis.set_xlim(0, None)
        axis.set_title(f"{backend.replace('_', ' ')}: {said(everyone)}", fontsize=9, loc="left")
    axes[-1].set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=colour, hatch=hatch, ec="white", label=words)
               for colour, hatch, words in STYLES.values()]  # fmt: skip
    figure.legend(handles=handles, fontsize=8, ncols=3, loc="lower center", frameon=False)
    what = f"ring attention, zigzag, {data['results']['tokens']:,} tokens, {ranks} ranks"
    more = data | data["versions"] | data["results"]
    finish(figure, axes, f"{what}, {data['model']}", more, path, bottom=0.09)


def lane(axis, y, what, begin, end, of):
    """One bar; of a kernel with its block, of messages with their size."""
    colour, hatch, _ = STYLES[what]
    axis.barh(y, end - begin, 0.86, begin, color=colour, hatch=hatch, ec="white", lw=0.4)
    if what in ("forward", "backward"):
        axis.text((begin + end) / 2, y, f"{of[0]},{of[1]}", ha="center", va="center", fontsize=6)
    elif what == "way" and of:
        axis.text(end, y, f" {of / 2**20:.2g} MiB sent", ha="left", va="center", fontsize=6)


def said(everyone):
    """What part of the time was computing, and what was waiting, posting included."""
    last = max(end for log in everyone for _, _, end, _ in log)

    def share(*kinds):
        spent = [sum(end - begin for what, begin, end, _ in log if what in kinds)
                 for log in everyone]  # fmt: skip
        return ", ".join(f"{100 * of / last:.1f}" for of in spent)

    return (f"kernels take {share('forward', 'backward')} % of the ranks' time, posting "
            f"{share('post')} %, waiting {share('wait')} %")  # fmt: skip
