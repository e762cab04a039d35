"""What the figures share: their titles, and what the diagrams are drawn with."""

import matplotlib.pyplot as plt

plt.switch_backend("Agg")  # which draws into files, without a display

# Okabe and Ito's colours, which colour-blind readers can tell apart; hatches for print.
RANKS = [("#0072B2", ""), ("#E69F00", "////"), ("#009E73", "...."), ("#CC79A7", "xxxx")]
SAME, SENT, PALE, LINE = "#BDBDBD", "#D55E00", "#FBE6DA", "#888888"
ARROW = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8}


def finish(figure, axes, what, data, path, bottom=0.0):
    """What all figures have: what was measured and on what, and no frames."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    machine = data.get("machine")
    if machine:
        on = [*machine["gpus"], "no NVLS, no cuDNN attention"] if machine["gpus"] else []
        machine = "; " + ", ".join(on or [f"{machine['cores']} cores of {machine['cpu']}"])
    dtype = f", {data['dtype']}" if "dtype" in data else ""
    figure.suptitle(
        f"{what}{dtype}{machine or ''}; torch {data['torch']}, transformers {data['transformers']}",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


class Canvas:
    """An empty picture, whose size is told when it is saved. In inches; y counts downwards."""

    def __init__(self):
        self.axis = plt.figure().add_axes((0, 0, 1, 1))

    def text(self, x, y, text, **style):
        self.axis.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 8.5} | style)

    def box(self, x, y, width, height, colour="none", edge="black", **style):
        style = {"linewidth": 0.8} | style
        self.axis.add_patch(plt.Rectangle((x, y), width, height, fc=colour, ec=edge, **style))

    def fill(self, x, y, width, height, rank):
        """In a rank's colour; None: in that of what is the same on all ranks."""
        colour, hatch = (SAME, "") if rank is None else RANKS[rank % len(RANKS)]
        self.box(x, y, width, height, colour, "white", hatch=hatch, linewidth=0)

    def arrow(self, start, end, colour="#555555", **style):
        self.axis.annotate("", end, start, arrowprops=ARROW | {"color": colour} | style)

    def heading(self, data, title, letters, width):
        """The title, and of what run all that is shown was recorded."""
        sizes, versions = data["results"]["sizes"], data["versions"]
        said = [data["model"], *(f"{letter} {sizes[letter]:,}" for letter in letters)]
        said += [data["dtype"], *(f"{k} {versions[k]}" for k in ("torch", "transformers"))]
        self.text(width / 2, 0.18, title, fontsize=12, fontweight="bold")
        self.text(width / 2, 0.43, f"recorded from a run: {', '.join(said)}")

    def band(self, x, y, width, rank, height=0.2):
        """A rank's head."""
        self.fill(x, y, width, height, rank)
        self.text(x + width / 2, y + height / 2, f"rank {rank}", fontweight="bold",
                  bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip

    def chip(self, x, y, rank, text, width=0.27, height=0.17, **style):
        """A small box in a rank's colour, around its middle."""
        self.fill(x - width / 2, y - height / 2, width, height, rank)
        self.box(x - width / 2, y - height / 2, width, height, **style)
        self.number(x, y, text)

    def number(self, x, y, text):
        """On a colour and a hatch."""
        self.text(x, y, text, fontsize=7.5, bbox={"fc": "white", "ec": "none", "pad": 0.7})

    def save(self, path, width, height):
        self.axis.set(xlim=(0, width), ylim=(height, 0))
        self.axis.axis("off")
        self.axis.figure.set_size_inches(width, height)
        self.axis.figure.savefig(path, dpi=150)
        plt.close(self.axis.figure)
        print(f"wrote {path}")
