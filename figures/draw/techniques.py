"""Draw what `figures/plan/estimate_check.py` has measured: what each technique saves and costs."""

import matplotlib.pyplot as plt

from figures.draw.canvas import RANKS, SAME, SENT, finish

SHOWN = {  # as the record names it: what a reader calls it
    "one process": "one process",
    "tp": "tensor parallel (Task 2)",
    "megatron-sp": "with Megatron's norms by tokens",
    "ulysses": "Ulysses (Task 4)",
    "ring": "ring attention",
    "1f1b": "pipeline, 1F1B",
    "ddp": "data parallel, DDP",
    "zero1": "ZeRO-1",
    "fsdp2": "FSDP2",
}


def draw_techniques(data, path):
    """Of each technique: a rank's peak of tensors in a step of AdamW, the bytes that it sends."""
    results, ranks = data["results"], data["world_size"]
    rows = [results["techniques"][name] for name in SHOWN]
    peaks = [row["tensors"] / 2**30 for row in rows]
    sent = [row["bytes"][0] / 1e6 for row in rows]
    figure, (memory, traffic) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    colours = [SAME] + [RANKS[0][0]] * (len(rows) - 1)
    for axis, values, colour, form in (
        (memory, peaks, colours, "{:.2f}"),
        (traffic, sent, SENT, "{:.0f}"),
    ):
        bars = axis.barh(range(len(rows)), values, color=colour, height=0.7)
        axis.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=10)
        axis.set_xlim(0, 1.15 * max(values))
        axis.tick_params(labelsize=10)
    memory.axvline(peaks[0], color="black", ls=":", lw=1)
    memory.set_yticks(range(len(rows)), SHOWN.values())
    memory.invert_yaxis()
    memory.set_title(f"GiB that each of {ranks} ranks needs", fontsize=11)
    traffic.set_title("MB that each sends in a step", fontsize=11)
    what = f"a step of AdamW, {data['model']}, {results['tokens']:,} tokens"
    finish(figure, (memory, traffic), what, data | data["versions"] | results, path)
