"""Who holds what, and what is sent when, in tensor and in sequence parallelism: from a recording.

The forward runs down the left, the backward up the right, so that a module and its backward, a
collective and its conjugate, are one row. Rows, bars and numbers are what `diagrams.py` recorded;
only the names are ours.
"""

import itertools
import math

from figures.draw.canvas import LINE, PALE, RANKS, SENT, Canvas

LEFT, LANE, BACK, SPACE, GRID, BAR, STEP = 1.3, 2.65, 1.4, 0.15, 0.62, 0.26, 0.12
WIDEST = 1.6  # of a weight that is drawn; a real model's vocabulary would take more
# The row of a module, and its output and its weight in the project's letters.
MODULES = {
    "tokens": (None, "B,S", None),
    "embed_tokens": ("embedding", "B,S,H", "V,H"), "input_layernorm": ("RMSNorm", "B,S,H", "H"),
    "q_proj": ("q, k, v", "B,S,N D", "N D,H"), "k_proj": ("q, k, v", "B,S,K D", "K D,H"),
    "v_proj": ("q, k, v", "B,S,K D", "K D,H"), "attention": ("attention", "B,S,N,D", None),
    "o_proj": ("o", "B,S,H", "H,N D"), "post_attention_layernorm": ("RMSNorm", "B,S,H", "H"),
    "gate_proj": ("gate, up", "B,S,F", "F,H"), "up_proj": ("gate, up", "B,S,F", "F,H"),
    "down_proj": ("down", "B,S,H", "H,F"), "norm": ("RMSNorm", "B,S,H", "H"),
    "lm_head": ("LM head", "B,S,V", "V,H"),
}  # fmt: skip
COLLECTIVES = {
    "CopyToRegion": "f: all-reduce", "ReduceFromRegion": "g: all-reduce", "AllToAll": "all-to-all",
    "VocabParallelCrossEntropy": "loss: all-gather of 3 numbers a token,",
    "sum_gradients": "all-reduce of all dW",
}  # fmt: skip
TITLES = {
    "tp": "Tensor parallelism (Task 2): who holds what, and what is sent when",
    "ulysses": "Ulysses sequence parallelism (Task 4): who holds what, and what is sent when",
}
LEGENDS = {  # of what is filled in a rank's colour; of the collectives
    "tp": (
        "a rank's slice, in the whole weight's outline (to scale; inputs down, outputs across)",
        "f and g: where one direction sends nothing, the other sums over the ranks.",
    ),
    "ulysses": (
        "a rank's tokens and heads; colour and hatch tell which rank computed them",
        "Each rank's dW is its tokens' part of the sum.",
    ),
}


def leaf(event):
    return event["at"].split(".")[-1]


def short(event):
    return leaf(event).removesuffix("_proj")


def numbers(shape):
    return f"({', '.join(map(str, shape))})" if shape else "of one number"


def size(events):
    """Bytes, the least and the most that a rank sends in them, as people say them."""
    counts = [sum(sent) for sent in zip(*(e["sent"] for e in events), strict=True)]
    power = min(2, int(math.log(max(*counts, 1), 1024)))
    said = [f"{count / 1024**power:.3g}" for count in (min(counts), max(counts))]
    return f"{' to '.join(dict.fromkeys(said))} {('bytes', 'KiB', 'MiB')[power]}"


def ranges(lengths):
    """[start, stop) of each, one behind the other."""
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


class Diagram(Canvas):
    """One technique's picture, drawn from the top down."""

    def __init__(self, data, technique):
        super().__init__()
        self.data, self.technique, self.sizes = data, technique, data["results"]["sizes"]
        self.parameters = data["results"][technique]["parameters"]
        self.events = data["results"][technique]["events"]
        self.ranks, self.y = range(self.sizes["P"]), 0.75
        self.scale = 0.45 / max(self.sizes["F"], self.sizes["H"])
        self.width = LEFT + len(self.ranks) * (LANE + BACK) + SPACE + 0.05
        begun = [e for e in self.events if "input" in e]
        self.rows = [list(r) for _, r in itertools.groupby(begun, lambda e: MODULES[leaf(e)][0])]
        self.grads = {e["at"]: e["gradient"] for e in self.events if "gradient" in e}
        # A collective is, forward, below the module that began last, and, backward, above it.
        self.sent, place = {}, {e["at"]: i for i, row in enumerate(self.rows) for e in row}
        for event in (e for e in self.events if "collective" in e):
            forward = event["phase"] == "forward"
            self.sent.setdefault((place[event["at"]] + forward, forward), []).append(event)
        (attention,) = (e for e in begun if leaf(e) == "attention")
        self.tokens = ranges(shape[1] for shape in begun[0]["input"])
        heads, group = ranges(s[1] for s in attention["input"]), self.sizes["N"] // self.sizes["K"]
        keys = [(first // group, first // group + shape[1])
                for (first, _), shape in zip(heads, attention["keys"], strict=True)]  # fmt: skip
        self.heads = {"q": (self.sizes["N"], heads), "k": (self.sizes["K"], keys)}

    # ------------------------------------------------------------ lanes

    def lanes(self, forward):
        """(rank, where its lane begins, how wide it is), in one half."""
        begin, width = (LEFT, LANE) if forward else (LEFT + len(self.ranks) * LANE + SPACE, BACK)
        return [(rank, begin + rank * width, width) for rank in self.ranks]

    def arrows(self, length, halves=(True, False)):
        """Down the lanes of the forward, up those of the backward."""
        for forward in halves:
            for _, x, _ in self.lanes(forward):
                ends = (x + 0.2, self.y), (x + 0.2, self.y + length)
                self.arrow(*(ends if forward else ends[::-1]))
        self.y += length

    def named(self, letters, shape):
        """(B, S/P, H): /P where a rank holds less than what the letters say, which is the most."""
        names = []
        for letter, local in zip(letters.split(","), shape, strict=True):
            whole = math.prod(self.sizes[name] for name in letter.split())
            assert 0 < local <= whole, (letters, shape)
            names.append(letter if local == whole else f"{letter[0]}/P{letter[1:]}")
        return f"({', '.join(names)})"

    # ------------------------------------------------------------ rows

    def draw(self, path):
        """All of it: heading, rows and what is between them, legend."""
        for forward, what in (True, "forward, downwards"), (False, "backward, upwards"):
            lanes = self.lanes(forward)
            middle = (lanes[0][1] + lanes[-1][1] + lanes[-1][2]) / 2
            self.text(middle, self.y, what, fontsize=10, fontweight="bold")
            for rank, x, width in lanes:
                self.band(x + 0.05, self.y + 0.14, width - 0.1, rank, 0.22)
        self.y += 0.36
        inside = [i for i, row in enumerate(self.rows) if "layers." in row[0]["at"]]
        for index, row in enumerate(self.rows):
            self.gap(index)
            if index == inside[0]:
                top = self.y - 0.05
            elif index == inside[-1] + 1:
                self.layer(top, self.y - 0.03)
            self.row(row)
        self.gap(len(self.rows))
        self.box(LEFT + 0.05, self.y, self.width - LEFT - 0.15, 0.26, "white", LINE)
        self.text((self.width + LEFT) / 2, self.y + 0.13, "the loss, the same on every rank; "
                  "from here the backward")  # fmt: skip
        self.finish(path)

    def layer(self, top, bottom):
        """The frame of a layer, and what is sent in it."""
        self.box(0.08, top, self.width - 0.11, bottom - top, "#F1F1F1", LINE, zorder=0)
        inside = [e for e in self.events if "collective" in e and "layers." in e["at"]]
        down, up = (size([e for e in inside if e["phase"] == p]) for p in ("forward", "backward"))
        said = f"all {self.sizes['layers']} layers are alike: in each a\n"
        said += f"rank sends {down} forward and {up} backward"
        self.text(0.27, (top + bottom) / 2, said, rotation=90)

    def row(self, events):
        """A module, or several side by side: what each rank holds of their weights."""
        name, weights = MODULES[leaf(events[0])][0], [e for e in events if leaf(e) != "attention"]
        held = [self.parameters[e["at"] + ".weight"] for e in weights]
        height = max([0.26 if name == "RMSNorm" else 0.38, *(
            0.12 + self.scale * h["whole"][1] for h in held if h["whole"][1:])])  # fmt: skip
        middle = self.y + height / 2
        self.text(LEFT - 0.05, middle, name, ha="right", fontweight="bold")
        for forward in True, False:
            for rank, x, width in self.lanes(forward):
                self.box(x + 0.05, self.y, width - 0.1, height, "white", LINE)
                x, end = x + 0.12, x + width / 2
                if not weights:
                    self.attention(rank, x, middle, forward, events[0])
                elif not forward:
                    part = held[0]["shapes"][rank] != held[0]["whole"]
                    said = "dW of its slice" if part else "dW, alike on all"
                    said = "dW, its part" if self.technique == "ulysses" else said
                    self.text(end, middle, said)
                else:
                    for event, h in zip(weights, held, strict=True):
                        x = self.weight(rank, x, middle, event, h, len(weights))
        self.y += height

    def weight(self, rank, x, middle, event, held, siblings):
        """A weight's outline, inputs down and outputs across, and the rank's slice in it."""
        shape, region = held["shapes"][rank], held["regions"][rank]
        box = [held["whole"][0] * self.scale, held["whole"][1] * self.scale if shape[1:] else 0.04]
        box[0] = min(box[0], WIDEST)
        place, part = [x, middle - box[1] / 2], box.copy()
        for dim, ((start, stop), whole) in enumerate(zip(region, held["whole"], strict=True)):
            place[dim] += box[dim] * start / whole
            part[dim] *= (stop - start) / whole
        self.fill(*place, *part, rank if shape != held["whole"] else None)
        self.box(x, middle - box[1] / 2, *box)
        letters = self.named(MODULES[leaf(event)][2], shape)
        said = f"{short(event) if siblings > 2 else letters}\n{numbers(shape)}"
        said = said if shape[1:] else said.replace("\n", " = ")
        self.text(x + box[0] + 0.05, middle, said, ha="left", fontsize=8)
        return x + box[0] + 0.1 + 0.062 * max(map(len, said.split("\n")))

    def attention(self, rank, x, middle, forward, event):
        """The rank's query heads, and below them the KV heads that they look at."""
        room = 1.3 if forward else BACK - 0.24
        for y, (count, held) in zip(
            (middle - 0.15, middle + 0.01), self.heads.values(), strict=True
        ):
            first, stop = (edge * room / count for edge in held[rank])
            self.fill(x + first, y, stop - first, 0.14, rank)
            for number in range(count):
                self.box(x + number * room / count, y, room / count, 0.14)
        if forward:
            said = (f"{event['input'][rank][1]} of {self.sizes['N']} query heads\n"
                    f"{event['keys'][rank][1]} of {self.sizes['K']} KV heads")  # fmt: skip
            self.text(x + room + 0.06, middle, said, ha="left", fontsize=8)

    # ------------------------------------------------------------ between rows

    def gap(self, index):
        """Between two rows: what comes out of the upper one, and what is sent."""
        down, up = (self.sent.get((index, forward)) for forward in (True, False))
        above = self.rows[index - 1]
        if not index:
            above = [{"at": "tokens", "output": self.rows[0][0]["input"]}]
            if up:  # the last of all, above the gradients of the first weight
                self.y += 0.07
                self.bar(False, up, None)
                self.y += BAR
        begin, sent = self.y, index and (down or up)
        exchange = sent and sent[0]["asked_by"] == "AllToAll"
        if not sent or exchange or index == len(self.rows):
            self.labels(above)
            self.arrows(2 * STEP, (True, False) if index or up else (True,))
        else:
            self.arrows(STEP)
        if exchange:
            self.exchange(leaf(self.rows[index][0]) == "attention", down, up)
        elif sent:
            self.bar(True, down, up)
            self.bar(False, up, down)
            self.y += BAR
            self.arrows(STEP)
        said = {"o": "+ residual", "down": "+ residual", "tokens": "tokens"}.get(short(above[0]))
        self.text(LEFT - 0.05, (begin + self.y) / 2, said or "", ha="right")

    def labels(self, above):
        """The shapes that go down, and those of the gradients that come up."""
        for (rank, x, _), (_, back, _) in zip(self.lanes(True), self.lanes(False), strict=True):
            shapes = {}  # what is of one shape is named together
            for event in above:
                shapes.setdefault(tuple(event["output"][rank]), []).append(short(event))
            said = [f"{', '.join(names)} " * (len(above) > 1) for names in shapes.values()]
            if len(shapes) == 1:
                said[0] += self.named(MODULES[leaf(above[0])][1], *shapes) + " = "
            said = [text + numbers(shape) for text, shape in zip(said, shapes, strict=True)]
            self.text(x + 0.3, self.y + STEP, ", ".join(said), ha="left")
            grads = [self.grads[e["at"]][rank] for e in above if e["at"] in self.grads]
            said = [f"d {short(event)}" for event in above[: len(grads)]]
            said = map(numbers, grads) if len(grads) == 1 else said
            self.text(back + 0.3, self.y + STEP, ", ".join(said), ha="left")

    def bar(self, forward, events, others, height=BAR, way=""):
        """A collective across the lanes; or, dashed, that here, unlike there, nothing is sent."""
        lanes = self.lanes(forward)
        first, last = lanes[0][1] + 0.05, lanes[-1][1] + lanes[-1][2] - 0.05
        name = COLLECTIVES[(events or others)[0]["asked_by"]]
        style = (PALE, SENT) if events else ("white", LINE)
        self.box(first, self.y, last - first, height, *style, linewidth=1.6 if events else 0.8,
                 linestyle="-" if events else "--")  # fmt: skip
        if not events:
            said = f"{name.split(':')[0]}: nothing is sent"
        elif forward:
            shape = events[0]["shape"][0]
            letters = f"{self.named('B,S,H', shape)} = " if len(shape) == 3 else ""
            said = f"{name} {way or letters + numbers(shape)}; each rank sends {size(events)}"
        else:
            said = f"{name}, {size(events)} each"
        self.text((first + last) / 2, self.y + BAR / 2, said)
        for (sender, x, width), (receiver, to, _) in itertools.product(lanes, lanes) if way else ():
            part = width / (len(lanes) + 1)  # who sends to whom, in the sender's colour
            top, bottom = (self.y + 0.24, self.y + height)[:: 1 if forward else -1]
            ends = (x + part * (receiver + 1), top), (to + part * (sender + 1), bottom)
            self.arrow(*ends, RANKS[sender % len(RANKS)][0])

    def exchange(self, into, down, up):
        """An all-to-all, and on each rank tokens x heads before and behind it."""
        for lower in False, True:
            self.y += 0.0 if lower else 0.15
            for forward in True, False:
                for rank, x, width in self.lanes(forward):
                    self.squares(x + 0.1, width, rank, into == lower, into, forward, lower)
            self.text(LEFT - 0.05, self.y + GRID / 2, "tokens down,\nheads across", ha="right",
                      fontsize=8)  # fmt: skip
            self.y += GRID
            self.arrows(0.1)
            if not lower:
                way = "from tokens to heads" if into else "from heads to tokens"
                self.bar(True, down, up, 0.6, way)
                self.bar(False, up, down, 0.6, way)
                self.y += 0.6
                self.arrows(0.1)

    def squares(self, x, width, rank, by_heads, into, forward, lower):
        """What a rank holds of q, k and v, or of the output: its tokens or its heads."""
        cell, high = (width - 0.3) / (self.sizes["N"] + 2 * self.sizes["K"]), GRID / self.sizes["S"]
        for name in "qkv" if into else ["output"]:
            count, held = self.heads["k" if name in "kv" else "q"]
            self.box(x, self.y, count * cell, GRID, "white")
            for origin in self.ranks:
                rows = self.tokens[origin if by_heads else rank]
                columns = held[rank if by_heads else origin]
                self.fill(x + columns[0] * cell, self.y + rows[0] * high,
                          (columns[1] - columns[0]) * cell, (rows[1] - rows[0]) * high,
                          origin if forward == lower else rank)  # fmt: skip
            for number in range(count):
                self.box(x + number * cell, self.y, cell, GRID, edge="#555555", linewidth=0.4)
            self.box(x, self.y, count * cell, GRID)
            if forward and not lower:
                said = f"{name}: {count}" + " heads" * (name not in "kv")
                self.text(x + count * cell / 2, self.y - 0.08, said, fontsize=8)
            x += count * cell + 0.05

    def finish(self, path):
        self.heading(self.data, TITLES[self.technique], "BSHNKDFVP", self.width)
        y, (filled, sums) = self.y + 0.42, LEGENDS[self.technique]
        if self.sizes["V"] * self.scale > WIDEST:
            filled = filled.replace("to scale", "to scale but for the vocabulary")
        for x, part, rank, what in (0.1, 0.15, 0, filled), (6.9, 0.3, None, "whole on all ranks"):
            self.box(x, y, 0.3, 0.14, "white")
            self.fill(x, y, part, 0.14, rank)
            self.box(x, y, 0.3, 0.14)
            self.text(x + 0.38, y + 0.07, what, ha="left")
        self.box(0.1, y + 0.24, 0.3, 0.14, PALE, SENT, linewidth=1.6)
        what = "a collective, and what each rank sends; an all-reduce 2 (P-1)/P of its tensor. "
        self.text(0.48, y + 0.31, what + sums, ha="left")
        self.save(path, self.width, y + 0.5)


def draw_diagrams(data, path):
    """Both pictures, beside the recording."""
    for technique in TITLES:
        Diagram(data, technique).draw(path.with_name(f"{technique}_diagram.png"))
