"""Who holds what, and what is sent along which axis, on a mesh of two: from a recording.

Slices, tokens, heads and numbers are what `mesh_diagrams.py` recorded; only the names are ours.
"""

from collections import Counter, defaultdict

from figures.draw.canvas import LINE, SENT, Canvas
from figures.draw.diagrams import leaf, size
from figures.draw.ring import RingPicture

WIDTH = 11.3
# A collective on the mesh, by who asked for it and the module that began last: its row in the table
# is of what it does for the forward.
LEAVE = {"embed_tokens": "out of the embedding", "o_proj": "out of attention",
         "down_proj": "out of the MLP", "lm_head": "sum of the losses"}  # fmt: skip
ENTER = {"input_layernorm": "into attention", "q_proj": "into attention",
         "post_attention_layernorm": "into the MLP", "gate_proj": "into the MLP",
         "norm": "into the LM head", "lm_head": "into the LM head"}  # fmt: skip
NORMS = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "two norms' dW")
PLACES = {
    "ReduceFromRegion": LEAVE, "ReduceScatterTokens": LEAVE,
    "CopyToRegion": ENTER, "GatherTokens": ENTER,
    "VocabParallelCrossEntropy": {"lm_head": "loss of each token"},
    "a norm": NORMS | {"norm": "last norm's dW"},
    "sum_gradients": {"embed_tokens": "all dW, at the end"},
}  # fmt: skip
ROWS = {  # in what order they are told, and what is behind the name
    "out of the embedding": " (g)", "into attention": " (f)", "q, k, v": ": tokens for heads",
    "output": ": heads for tokens", "out of attention": " (g)", "into the MLP": " (f)",
    "out of the MLP": " (g)", "two norms' dW": "", "into the LM head": " (f)",
    "loss of each token": ": 3 numbers", "sum of the losses": "", "last norm's dW": "",
    "all dW, at the end": "",
}  # fmt: skip


def place(event):
    """The row of the table that tells of this collective."""
    if event["asked_by"] == "AllToAll":
        into = (leaf(event), event["phase"]) in (("v_proj", "forward"), ("attention", "backward"))
        return "q, k, v" if into else "output"
    return PLACES[event["asked_by"]][leaf(event)]


def name(event):
    """A collective's, as people say it. (A reduce-scatter is an all-to-all and a sum here.)"""
    said = event["collective"].removesuffix("_single").replace("_", "-")
    apart = said == "all-to-all" and event["asked_by"] != "AllToAll"
    return "reduce-scatter" if apart else said


def told(events):
    """How many of which, and what a rank sends in them."""
    counts = Counter(map(name, events))
    said = (f"{n} {what}s" if n > 1 else what for what, n in counts.items())
    return f"{', '.join(said)}: {size(events)}" if events else "nothing"


class MeshPicture(Canvas):
    """The ranks as they stand in the mesh, what is between them, and a table of all collectives."""

    TITLE = "Tensor x sequence parallelism on a mesh of {} x {}: who holds what, and what is sent"
    LEFT, BOX, ACROSS, HIGH, DOWN = 0.62, 4.05, 2.46, 2.4, 0.84

    def __init__(self, data):
        super().__init__()
        mesh, self.data, self.sizes = data["results"]["mesh"], data, data["results"]["sizes"]
        self.mesh, self.parameters = mesh["sp x tp"], mesh["parameters"]
        self.variants = {key: of for key, of in mesh.items() if "events" in of}
        self.scale = 0.45 / self.sizes["F"]
        self.drawn = 0  # collectives

    def some(self, variant, axis, phase, inside=True):
        """Collectives: of a layer, or outside."""
        return [e for e in self.variants[variant]["events"] if (e["axis"], e["phase"]) ==
                (axis, phase) and ("layers." in e["at"]) == inside]  # fmt: skip

    def draw(self, path):
        rows, columns = len(self.mesh), len(self.mesh[0])
        self.heading(self.data, self.TITLE.format(rows, columns), "BSHNKDFV", WIDTH)
        top = 0.86
        for s, row in enumerate(self.mesh):
            y = top + s * (self.HIGH + self.DOWN)
            first, stop = self.tokens(row[0])
            said = f"sp {s}\ntokens {first} to {stop - 1}"
            self.text(0.3, y + self.HIGH / 2, said, rotation=90, fontweight="bold")
            for t, rank in enumerate(row):
                x = self.LEFT + t * (self.BOX + self.ACROSS)
                if not s:
                    said = f"tp {t}: slice {t} of every matrix"
                    self.text(x + self.BOX / 2, top - 0.12, said, fontweight="bold")
                self.rank(x, y, rank)
                if t:
                    self.along_tp(x - self.ACROSS, y)
                if s:
                    self.along_sp(x, y - self.DOWN)
        middle = self.LEFT + self.BOX + self.ACROSS / 2
        said = "a row: the same tokens,\nother slices\na column: other tokens,\nthe same slices"
        self.text(middle, top + self.HIGH + self.DOWN / 2, said, fontsize=8)
        y = self.table(top + rows * self.HIGH + (rows - 1) * self.DOWN + 0.16)
        self.save(path, WIDTH, self.legend(y + 0.08))

    def tokens(self, rank, variant="all-reduce"):
        return self.variants[variant]["ranks"][rank]["tokens"]

    def rank(self, x, y, rank):
        """Its slices of the weights; its tokens; its heads before and behind the all-to-all."""
        self.box(x, y, self.BOX, self.HIGH, "white", LINE)
        self.band(x, y, self.BOX, rank)
        names = {name.removesuffix(".weight").split(".")[-1]: of
                 for name, of in self.parameters.items()}  # fmt: skip
        self.weight(x + 0.12, y + 0.4, rank, names["embed_tokens"], "embedding")
        self.weight(x + 2.12, y + 0.4, rank, names["lm_head"], "LM head")
        across = x + 0.12
        for said in ("q", "k", "v", "o", "gate", "up", "down"):
            held = names[f"{said}_proj"]
            self.weight(across, y + 0.75, rank, held, said)
            across += max(0.4, held["whole"][0] * self.scale + 0.17)
        norms = [held for name, held in names.items() if "norm" in name]
        assert all(held == norms[0] for held in norms)
        self.weight(across, y + 0.75, rank, norms[0], "norms")
        bars = {"all-reduce": "tokens", "megatron-sp": "in norms, with --megatron-sp"}
        for at, (variant, said) in enumerate(bars.items()):
            first, stop = self.tokens(rank, variant)
            down, room = y + 1.3 + 0.18 * at, 1.85 / self.sizes["S"]
            self.fill(x + 0.12 + first * room, down, (stop - first) * room, 0.12, rank)
            self.box(x + 0.12, down, 1.85, 0.12)
            self.text(x + 2.03, down + 0.06, f"{said}: {stop - first}", fontsize=7.5, ha="left")
        self.squares(x + 0.12, y + 1.82, rank, False)
        self.arrow((x + 1.77, y + 2.07), (x + 2.33, y + 2.07), SENT)
        self.text(x + 2.04, y + 1.98, "all-to-all", fontsize=7, color=SENT)
        self.squares(x + 2.4, y + 1.82, rank, True)

    def weight(self, x, y, rank, held, said):
        """Its outline, inputs down and outputs across, and this rank's slice in it."""
        box = [whole * self.scale for whole in held["whole"]] + [0.05]  # of a vector: its height
        parts = [[end * self.scale for end in region] for region in held["regions"][rank]]
        (left, right), (top, bottom) = [*parts, (0, 0.05)][:2]
        part = held["shapes"][rank] != held["whole"]
        self.fill(x + left, y + top, right - left, bottom - top, rank if part else None)
        self.box(x, y, *box[:2])
        self.text(x + box[0] / 2, y - 0.07, said, fontsize=7.5)

    def squares(self, x, y, rank, attended):
        """Tokens down, heads across; a colour tells which rank has computed a part."""
        of, cell, high = self.variants["all-reduce"]["ranks"], 0.092, 0.5
        heads = of[rank]["attended" if attended else "made"]
        for kind in "qkv":
            count, (first, stop) = self.sizes["N" if kind == "q" else "K"], heads[kind != "q"]
            down = high / self.sizes["S"]
            self.box(x, y, count * cell, high, "white")
            column = next(line for line in zip(*self.mesh, strict=True) if rank in line)
            for origin in column if attended else [rank]:
                begin, end = of[origin]["tokens"]
                self.fill(x + first * cell, y + begin * down, (stop - first) * cell,
                          (end - begin) * down, origin)  # fmt: skip
            for number in range(count):
                self.box(x + number * cell, y, cell, high, edge="#555555", linewidth=0.4)
            self.box(x, y, count * cell, high)
            said = f"{kind}: {stop - first}" + f" of {count} heads" * (kind == "q")
            self.text(x + count * cell / 2, y - 0.08, said, fontsize=7)
            x += count * cell + 0.06

    def along_tp(self, x, y):
        """Between two ranks of a row: what they send each other in a layer."""
        x, y, right = x + 0.06, y + 0.42, x + self.ACROSS - 0.06
        self.arrow((x, y), (right, y), SENT, arrowstyle="<|-|>")
        self.text((x + right) / 2, y - 0.11, "along tp, in each layer", fontweight="bold")
        for variant, said in ("all-reduce", ""), ("megatron-sp", "with --megatron-sp"):
            lines = [said, *self.lines(variant, "tp", "forward", "backward")]
            self.text((x + right) / 2, y + 0.1, "\n".join(lines), va="top", fontsize=8)
            y += 0.17 * len(lines)

    def along_sp(self, x, y):
        """Between two ranks of a column: in a layer, and what is summed at the end."""
        self.arrow((x + 0.6, y + 0.04), (x + 0.6, y + self.DOWN - 0.04), SENT, arrowstyle="<|-|>")
        self.text(x + 0.75, y + 0.15, "along sp, in each layer", fontweight="bold", ha="left")
        (end,) = self.some("all-reduce", "sp", "gradients", inside=False)
        lines = [*self.lines("all-reduce", "sp", "forward", "backward"),
                 f"after the backward: {told([end])} of all dW"]  # fmt: skip
        assert lines[:2] == self.lines("megatron-sp", "sp", "forward", "backward")
        self.text(x + 0.75, y + 0.27, "\n".join(lines), va="top", ha="left", fontsize=8)

    def lines(self, variant, axis, *phases):
        """A layer's, for each phase, a line for each kind."""
        said = [f"{phase}: {told(self.some(variant, axis, phase))}" for phase in phases]
        return "\n".join(said).replace(", ", ",\n").split("\n")

    # ------------------------------------------------------------ all of them

    def table(self, y):
        """A row for each place of the model, a column for each variant and direction."""
        columns = {  # (variant, phase): where it begins
            (variant, phase): 3.3 + 4 * v + 2 * p
            for v, variant in enumerate(self.variants)
            for p, phase in enumerate(("forward", "backward"))
        }
        for variant, x in zip(self.variants, (3.3, 7.3), strict=True):
            said = "Task 2's f and g" if variant == "all-reduce" else "--megatron-sp"
            self.text(x, y, said, ha="left", fontweight="bold")
        self.text(8.4, y, "(a reduce-scatter: an all-to-all and a sum)", ha="left", fontsize=8)
        y += 0.18
        self.text(0.15, y, "all that is sent, and where", ha="left", fontweight="bold")
        self.text(2.55, y, "along", fontsize=8)
        for (_, phase), x in columns.items():
            self.text(x, y, phase, ha="left", fontsize=8)
        rows, first, y = defaultdict(lambda: defaultdict(list)), y + 0.12, y + 0.12
        for variant, of in self.variants.items():
            for e in of["events"]:
                phase = "forward" if e["phase"] == "forward" else "backward"
                rows[place(e), e["axis"]][variant, phase].append(e)
        for what, axis in sorted(rows, key=lambda row: [*ROWS].index(row[0])):
            cells = rows[what, axis]
            if any("layers." in e["at"] for of in cells.values() for e in of):
                self.box(0.08, y, WIDTH - 0.16, 0.19, "#F1F1F1", "none", zorder=0)
            self.text(0.15, y + 0.1, what + ROWS[what], ha="left", fontsize=8)
            self.text(2.55, y + 0.1, axis, fontsize=8)
            for at, x in columns.items():
                ink = "black" if cells[at] else LINE
                self.text(x, y + 0.1, told(cells[at]), ha="left", fontsize=8, color=ink)
                self.drawn += len(cells[at])
            y += 0.19
        self.box(0.08, first, WIDTH - 0.16, y - first, edge=LINE)
        return y

    def legend(self, y):
        rows = (
            "a rank's slice of a weight, in the whole one's outline (to scale; inputs down, "
            "outputs across); grey: whole on all ranks. Below the weights: its part of the tokens.",
            "tokens down, heads across: q, k, v before and after the all-to-all. The colour tells "
            "which rank computed a part, and so what has been sent.",
            f"in each of the {self.sizes['layers']} layers; the rest once. Bytes are what a rank "
            "sends: of an all-reduce 2 (P-1)/P of its tensor, of the others (P-1)/P of the whole, "
            "P the ranks of the axis.",
        )  # fmt: skip
        for number, said in enumerate(rows):
            grey = number == 2
            self.box(0.12, y + 0.03, 0.3, 0.14, "#F1F1F1" if grey else "white", LINE)
            for part, rank in enumerate(((0,), (0, 2), ())[number]):
                self.fill(0.12, y + 0.03 + 0.07 * part, 0.15, 0.14 - 0.07 * part, rank)
            self.box(0.12, y + 0.03, 0.3, 0.14, edge=LINE if grey else "black")
            self.text(0.5, y + 0.1, said, ha="left", fontsize=8)
            y += 0.21
        return y + 0.04


def draw_mesh_diagrams(data, path):
    """Both pictures, beside the recording."""
    RingPicture(data).draw(path.with_name("ring_diagram.png"))
    MeshPicture(data).draw(path.with_name("mesh_diagram.png"))
