"""Who holds what, and what is sent when: recorded from a run of Tasks 2 and 4, then drawn.

    python -m figures.bench.diagrams  # starts the run, writes diagrams.json, draws two pictures

Under torchrun it is the run itself: each parallel model, its loss checked, does one forward and
backward. Written down are every module that begins, with the shapes that it takes and gives, and
every collective, where it really is called. All layers must do the same, and one is kept.
"""

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from figures import RECORDS
from figures.bench.records import torchrun, write_record
from guards.agreement import without_comparing
from harness.flags import make_parser, positive
from harness.job import start
from harness.model_checks import expect_loss
from shared_memory.traffic import Meter
from tp_llama import tensor_parallelize
from ulysses_forward import sequence_parallelize
from utils.replicas import sum_gradients
from utils.shards import shard_of

COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::alltoall_base_": "all_to_all_single",
}


class Recorder(Meter):
    """This rank's events, in order, each with its `phase` and `at`, the module that began last.

    Of a module that begins: the shapes of `input` and `output`; backward it begins when the
    `gradient` of its output is there. Of a collective: its name, `asked_by` (the autograd function
    or `sum_gradients`), its tensor's `shape`, and `sent`, bytes that this rank sends.
    """

    def __init__(self, model):
        super().__init__()
        self.events, self.phase, self.at = [], "forward", None
        self.layers = {layer.self_attn: i for i, layer in enumerate(model.model.layers)}
        for name, module in model.named_modules():
            if dict(module.named_parameters(recurse=False)):
                # Behind the technique's own hooks: what f gives goes in, what g gives comes out.
                name = name.removeprefix("model.")
                module.register_forward_pre_hook(partial(self.begin, name))
                module.register_forward_hook(partial(self.end, name))

    def note(self, at, **event):
        self.at = at
        self.events.append({"phase": self.phase, "at": at} | event)

    def begin(self, name, module, args):
        self.note(name, input=list(args[0].shape))

    def end(self, name, module, args, output):
        event = next(e for e in reversed(self.events) if e["at"] == name and "input" in e)
        event["output"] = list(output.shape)
        output.register_hook(lambda grad: self.note(name, gradient=list(grad.shape)))

    def attention(self, attend, module, query, key, *args, **kwargs):
        """In the place of Hugging Face's attention: what a rank attends with, (B, heads, S, D)."""
        name = f"layers.{self.layers[module]}.self_attn.attention"
        self.note(name, input=list(query.shape), keys=list(key.shape))
        output, weights = attend(module, query, key, *args, **kwargs)
        self.end(name, module, None, output)
        return output, weights

    def count(self, name, tensor, sent):
        """A collective."""
        kind = COLLECTIVES[name]
        shape = list(tensor.shape[kind == "all_gather" :])  # there its first dim is the ranks'
        self.note(self.at, collective=kind, asked_by=asked_by(), shape=shape, sent=int(sent))


def asked_by():
    """What in the call stack wanted the collective: an autograd function, or `sum_gradients`."""
    frame = sys._getframe(1)
    while frame:
        if "ctx" in frame.f_locals:
            return type(frame.f_locals["ctx"]).__name__.removesuffix("Backward")
        if frame.f_code.co_name == "sum_gradients":
            return "sum_gradients"
        frame = frame.f_back


def one_layer(events):
    """Events, of the layers only the first one's; the others' must be the same."""
    layers, kept = {}, []
    for event in events:
        number = re.match(r"layers\.(\d+)", event["at"])
        if number:
            alike = event | {"at": event["at"].replace(number[0], "layers.0", 1)}
            layers.setdefault(number[1], []).append(alike)
        if not number or number[1] == "0":
            kept.append(event)
    assert all(layer == layers["0"] for layer in layers.values()), "layers differ"
    return kept


def step(model, recorder, reduce, ids):
    """Forward and backward of a parallel model's loss, and nothing that ranks compare beside it."""
    with recorder, without_comparing():
        loss = model(ids, labels=ids).loss
        recorder.phase = "backward"
        loss.backward()
        recorder.phase = "gradients"
        reduce(model.parameters())
    return loss.detach()


def check(run, name, loss, reference, ids):
    """By the unmodified model's."""
    expected, least_error = expect_loss(run, run.references(reference), ids)
    run.check(name, [(loss, *expected)], least_error=least_error)


def record(run, parallelize, reduce, reference, ids, watch=Recorder):
    """A step of a parallel model: who holds what, and what happened.

    watch(model): a `Recorder`.
    """
    model, attend = run.load_model(parallelize), ALL_ATTENTION_FUNCTIONS["sdpa"]
    recorder = watch(model)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(recorder.attention, attend)
    loss = step(model, recorder, reduce, ids)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    check(run, "loss", loss, reference, ids)

    events = one_layer(recorder.events)
    held = {name.removeprefix("model."): (list(p.shape), [(s.start, s.stop) for s in shard_of(p)])
            for name, p in model.named_parameters(remove_duplicate=False)}  # fmt: skip
    everyone = run.gather_objects((events, held))
    whole = run.broadcast(reference and {
        name.removeprefix("model."): list(p.shape)
        for name, p in reference.named_parameters(remove_duplicate=False)
    })  # fmt: skip
    return {
        "parameters": {
            name: {"whole": whole[name], "shapes": [holds[name][0] for _, holds in everyone],
                   "regions": [holds[name][1] for _, holds in everyone]}  # (start, stop) a dim
            for name in held if name.rpartition(".")[0] in {event["at"] for event in events}
        },
        "events": [together(same) for same in zip(*(told for told, _ in everyone), strict=True)],
    }  # fmt: skip


def together(ranks):
    """One event of all ranks: the same words, and a list of every rank's numbers."""
    words = [{k: v for k, v in event.items() if isinstance(v, str)} for event in ranks]
    assert all(word == words[0] for word in words), words
    return words[0] | {k: [e[k] for e in ranks] for k in ranks[0] if k not in words[0]}


def begin(run, args):
    """The unmodified model, on rank 0, and what all models are given; their sizes are written."""
    config, reference = run.source.config, run.load_reference()
    run.results["sizes"] = {
        "B": args.batch_size, "S": args.seq_len, "H": config.hidden_size,
        "N": config.num_attention_heads, "K": config.num_key_value_heads,
        "D": config.head_dim, "F": config.intermediate_size, "V": config.vocab_size,
        "P": run.world_size, "layers": config.num_hidden_layers,
    }  # fmt: skip
    ids = torch.randint(config.vocab_size, (args.batch_size, args.seq_len))
    return reference, run.broadcast(ids)


def measure(run, args):
    """Both techniques, on the ranks of this job."""
    tp, sp = run.mesh("tp"), run.mesh("sp")
    reference, ids = begin(run, args)
    run.results["tp"] = record(
        run, lambda model: tensor_parallelize(model, tp), lambda _: None, reference, ids
    )
    run.results["ulysses"] = record(
        run, lambda model: sequence_parallelize(model, sp),
        lambda tensors: sum_gradients(tensors, sp), reference, ids,
    )  # fmt: skip


def drive(script, args):
    """Record under torchrun, keep what a reader needs, draw it."""
    from figures.draw.kinds import kind, picture_of  # the ranks need no matplotlib

    if not os.access(args.output.resolve().parent, os.W_OK):
        sys.exit(f"error: {args.output}: cannot be written there; name another file")
    whole, _ = torchrun(script, args.ranks, "--model", args.model, "--device", "cpu")
    if not whole:
        sys.exit("error: the run failed; nothing was written")
    kept = {key: whole[key] for key in ("model", "dtype", "versions", "results")}
    write_record(args.output, kept)  # an event on a line: for a file that people read, and compare
    kind(kept)(kept, picture_of(args.output))


def main(script=__file__, doc=__doc__, ranks=2, measure=measure):
    """Of this script, and of another that records the like."""
    if "RANK" in os.environ:
        parser = make_parser(doc)
        parser.add_argument("--batch-size", type=positive, default=2, help="default 2")
        parser.add_argument("--seq-len", type=positive, default=64, help="tokens; default 64")
        start(parser.parse_args(), measure)
    else:
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        flag, output = parser.add_argument, RECORDS / f"{Path(script).stem}.json"
        flag("--model", default="tiny", help="default tiny")
        flag("--ranks", type=positive, default=ranks, help="default %(default)s")
        flag("--output", type=Path, default=output, help="default %(default)s")
        drive(script, parser.parse_args())


if __name__ == "__main__":
    main()
