"""Who computes which block, and what travels when, in a ring of ranks: from a recording.

Blocks, chunks, arrows and numbers are what `mesh_diagrams.py` recorded; only the names are ours.
"""

from collections import Counter, defaultdict

import matplotlib.pyplot as plt

from figures.draw.canvas import LINE, RANKS, SENT, Canvas

WIDTH = 11.3


def colour(rank):
    return RANKS[rank % len(RANKS)][0]


class RingPicture(Canvas):
    """Both layouts side by side: blocks of the scores, then hop after hop, forward and backward."""

    TITLE = "Ring attention on {} ranks: who computes which block, and what travels when"
    SIDE, LEFT, CELL = 2.4, 0.72, 1.18

    def __init__(self, data):
        super().__init__()
        self.data, self.ranks = data, range(data["results"]["sizes"]["P"])
        self.drawn = Counter()

    def draw(self, path):
        self.heading(self.data, self.TITLE.format(len(self.ranks)), "BSNKDP", WIDTH)
        for at, (layout, told) in enumerate(self.data["results"]["ring"].items()):
            self.layout(0.1 + at * WIDTH / 2, layout, told)
        self.legend(9.46)
        self.save(path, WIDTH, 10.13)

    def layout(self, x, layout, told):
        """One layout, from the left edge x on."""
        self.hops, self.tokens = defaultdict(dict), told["tokens"]
        for event in told["hops"]:
            self.hops[event["phase"], event["hop"]][event["rank"]] = event
        self.last = max(hop for _, hop in self.hops)
        start = self.hops["forward", 0]
        self.home = {chunk: rank for rank in self.ranks for chunk in start[rank]["holds"]}
        each, length = len(start[0]["holds"]), self.size(0)
        said = f"{layout}: {each} chunk{'s' * (each > 1)} of {length} tokens a rank"
        self.text(x + 2.7, 0.74, said, fontsize=11, fontweight="bold")
        self.square(x + self.LEFT, 1.32)
        self.totals(x + self.LEFT + self.SIDE + 0.14, 1.32, told)
        self.forward(x, 3.9)
        self.backward(x, 6.86)

    def size(self, chunk):
        return self.tokens[chunk][1] - self.tokens[chunk][0]

    # ------------------------------------------------------------ blocks

    def square(self, x, y):
        """Queries down, keys across; a block in the colour of the rank that computes it."""
        count = len(self.tokens)
        cell, edge = self.SIDE / count, {"color": "#444444", "linewidth": 0.6}
        self.text(x + self.SIDE / 2, y - 0.37, "chunk of keys and values", fontsize=8)
        self.text(x - 0.4, y + self.SIDE / 2, "chunk of queries", fontsize=8, rotation=90)
        for chunk, rank in self.home.items():
            middle = (chunk + 0.5) * cell
            self.chip(x + middle, y - 0.15, rank, chunk)
            self.chip(x - 0.18, y + middle, rank, chunk)
        for hop in range(self.last + 1):
            for rank, event in self.hops["forward", hop].items():
                for block in event["computes"]:
                    self.block(x, y, cell, rank, hop, *block)
        for line in range(1, count):
            self.axis.plot([x + line * cell] * 2, [y, y + self.SIDE], **edge)
            self.axis.plot([x, x + self.SIDE], [y + line * cell] * 2, **edge)
        self.box(x, y, self.SIDE, self.SIDE)

    def block(self, x, y, cell, rank, hop, i, j, pairs):
        """All of it, or what is causally seen: on and below the diagonal."""
        x, y, whole = x + j * cell, y + i * cell, pairs == self.size(i) * self.size(j)
        corners = [(x, y), (x, y + cell), (x + cell, y + cell), (x + cell, y)][: 3 + whole]
        face, hatch = RANKS[rank % len(RANKS)]
        style = {"hatch": hatch, "fc": face, "ec": "white", "linewidth": 0}
        self.axis.add_patch(plt.Polygon(corners, **style))
        right, down = (0.5, 0.5) if whole else (0.3, 0.66)
        self.number(x + right * cell, y + down * cell, hop)

    def totals(self, x, y, told):
        """What each rank computes and sends, and what the formula says that it sends."""
        columns, rows = (0.2, 0.6, 0.98, 1.41, 1.95), []
        heads = ("rank", "blocks", "pairs", "sent\nforward", "sent\nbackward")
        for column, words in zip(columns, heads, strict=True):
            self.text(x + column, y + 0.05, words, fontsize=8)
        for rank in self.ranks:
            pairs, sent = [], dict.fromkeys(("forward", "backward"), 0)
            for (phase, _), events in self.hops.items():
                mine = events[rank]
                pairs += [seen for *_, seen in mine["computes"] if phase == "forward"]
                messages = [*mine["sends"], *mine.get("gradients", [])]
                sent[phase] += sum(nbytes for *_, nbytes in messages) / 1024
            rows.append((len(pairs), sum(pairs), *sent.values()))
            self.chip(x + columns[0], y + 0.36 + 0.23 * rank, rank, rank)
        means = [sum(of) / len(rows) for of in zip(*rows, strict=True)]
        formula = [nbytes / 1024 for nbytes in told["formula"]]
        for number, values in enumerate([*rows, means, formula]):
            middle = y + 0.36 + 0.23 * number
            if number >= len(rows):
                name = "mean" if values is means else "formula"
                self.text(x + columns[0], middle, name, fontsize=8)
            for column, value in zip(columns[-len(values) :], values, strict=True):
                self.text(x + column, middle, f"{value:g}", fontsize=8)
        most = max(pairs for _, pairs, *_ in rows) / means[1]
        said = "sent: KiB. pairs: of a query and a key\nthat it sees; the most of a rank is\n"
        self.text(x, y + 2.03, f"{said}{most:.2f} times the mean", ha="left", fontsize=8)

    # ------------------------------------------------------------ hops

    def lanes(self, x, y, title):
        self.text(x + self.LEFT, y, title, ha="left", fontweight="bold", fontsize=9)
        for rank in self.ranks:
            self.band(self.lane(x, rank) + 0.04, y + 0.13, self.CELL - 0.08, rank)
        return y + 0.38

    def lane(self, x, rank):
        return x + self.LEFT + rank * self.CELL

    def row(self, x, y, height, name):
        self.text(x + self.LEFT - 0.08, y + height / 2, name, ha="right", fontweight="bold")
        for rank in self.ranks:
            self.box(self.lane(x, rank) + 0.04, y, self.CELL - 0.08, height, "white", LINE)

    def places(self, x, rank, chunks, middle=0.36):
        """{chunk: the middle of its chip}, in a lane."""
        left = self.lane(x, rank) + middle * self.CELL - 0.155 * (len(chunks) - 1)
        return {chunk: left + 0.31 * at for at, chunk in enumerate(sorted(chunks))}

    def send(self, chunk, start, end, home=False):
        self.drawn["messages"] += 1
        self.arrow(start, end, colour(self.home[chunk]), linestyle="--" if home else "-")

    def sent(self, x, middle, messages):
        """How many messages, of how many bytes."""
        counts = Counter(nbytes for *_, nbytes in messages)
        said = "\n".join(f"{count} x {n / 1024:g} KiB" for n, count in sorted(counts.items()))
        self.text(x + self.LEFT - 0.08, middle, said, ha="right", fontsize=7.5, color=SENT)

    def forward(self, x, y):
        y = self.lanes(x, y, "forward: chunks of keys and values, and blocks computed")
        height, gap = 0.37, 0.3
        for hop in range(self.last + 1):
            self.row(x, y, height, f"hop {hop}")
            events = self.hops["forward", hop]
            for rank, event in events.items():
                places = self.places(x, rank, event["holds"])
                for chunk, at in places.items():
                    self.chip(at, y + height / 2, self.home[chunk], chunk)
                blocks = "\n".join(f"{i},{j}" for i, j, _ in sorted(event["computes"]))
                self.text(self.lane(x, rank) + 0.96, y + height / 2, blocks, fontsize=7,
                          linespacing=0.95)  # fmt: skip
                self.drawn["blocks"] += len(event["computes"])
                for chunk, to, _ in event["sends"]:
                    there = self.hops["forward", hop + 1][to]["holds"]
                    end = self.places(x, to, there)[chunk], y + height + gap
                    self.send(chunk, (places[chunk], y + height), end)
            if hop < self.last:
                messages = [m for event in events.values() for m in event["sends"]]
                self.sent(x, y + height + gap / 2, messages)
            y += height + gap

    def backward(self, x, y):
        """Gradients. Keys and values travel as in the forward, and blocks are the same."""
        for hop in range(self.last + 1):
            for rank, event in self.hops["forward", hop].items():
                again = self.hops["backward", hop][rank]
                assert all(again[key] == event[key] for key in ("holds", "computes", "sends"))
        y = self.lanes(x, y, "backward: gradients; keys and values travel again, as above")
        height, gap, came = 0.22, 0.32, {rank: [] for rank in self.ranks}
        for hop in range(self.last + 2):
            self.row(x, y, height, f"hop {hop}" if hop <= self.last else "end")
            # What is sent of a hop's gradients; those of hop 0 stay, and others come home to them.
            sends = {
                rank: self.hops["backward", hop][rank].get("gradients", [])
                if hop <= self.last else [] for rank in self.ranks
            }  # fmt: skip
            after = self.hops["backward", hop + 1] if hop < self.last else {}
            coming = {rank: [chunk for of in sends.values() for chunk, to, _ in of
                             if to == rank == self.home[chunk]] for rank in self.ranks}  # fmt: skip
            for rank in self.ranks:
                own = [*self.hops["backward", 0][rank]["holds"]] if hop == 0 else came[rank]
                places = self.places(x, rank, [*own, *(chunk for chunk, *_ in sends[rank])], 0.5)
                for chunk, at in places.items():
                    self.chip(at, y + height / 2, self.home[chunk], chunk, height=0.15,
                              linewidth=2 if chunk in own else 0.8)  # fmt: skip
                for chunk, to, _ in sends[rank]:
                    there = [c for c, *_ in after[to]["gradients"]] if after else []
                    end = self.places(x, to, [*there, *coming[to]], 0.5)[chunk], y + height + gap
                    self.send(chunk, (places[chunk], y + height), end, chunk in coming[to])
            if hop:
                self.sent(x, y + height + gap / 2, [m for of in sends.values() for m in of])
            came, y = coming, y + height + (gap if hop else 0.08)

    def legend(self, y):
        rows = (
            "a chunk of keys and values, or of their gradients, in the colour of its home rank. "
            "Arrow: a message; orange: how many of these, and their bytes.",
            "gradients at home: those of hop 0 stay; the others are added to on their way, and "
            "come home (dashed) from the last rank that needed the keys.",
            "a block of scores, in the colour of the rank that computes it, and the hop in which "
            "it does. In the forward i,j is queries of chunk i with keys of chunk j.",
        )  # fmt: skip
        for number, said in enumerate(rows):
            middle = y + 0.1 + 0.21 * number
            if number < 2:
                self.chip(0.3, middle, 0, 0, height=0.15, linewidth=2 if number else 0.8)
            else:
                self.fill(0.165, middle - 0.08, 0.27, 0.16, 0)
                self.number(0.3, middle, 0)
            self.text(0.52, middle, said, ha="left", fontsize=8)
