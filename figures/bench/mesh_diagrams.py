"""Who holds what, and what is sent when: recorded from a ring and from a mesh of two axes.

    python -m figures.bench.mesh_diagrams  # as diagrams.py, into mesh_diagrams.json

Under torchrun it is the run itself, on 4 ranks: as `diagrams.py`, with the same checks of the loss.
Of a ring, what happens in an attention, in both layouts: what a rank has at a hop, which blocks it
computes, what it sends to whom. Of tensor x sequence parallelism what `diagrams.py` records, and of
each collective the axis. The scripts of the tasks run as they are; their functions are wrapped.
"""

import sys
from functools import partial
from unittest import mock

import torch.distributed as dist
import torch.nn.functional as F

import ring_attention
from figures.bench.diagrams import Recorder, begin, check, main, record, step
from ring_attention import (
    Ring,
    attend,
    attend_backward,
    comm_bytes_per_layer,
    exchange,
    ring_backward,
    ring_forward,
    ring_parallelize,
)
from shared_memory.traffic import Meter
from tp_ulysses import parallelize_tp_sp
from utils.errors import UserError
from utils.replicas import sum_gradients
from utils.shards import shard_of

LAYOUTS = {"contiguous": False, "zigzag": True}
VARIANTS = {"all-reduce": False, "megatron-sp": True}  # of tensor parallelism between its blocks

# ---------------------------------------------------------------- a ring


def knowing(chunks):
    """A kind of ring that tells which chunk a tensor is, by its address: chunks, a dict to fill."""

    def know(pieces):
        chunks.update({piece.data_ptr(): chunk for chunk, piece in pieces.items()})
        return pieces

    class KnowingRing(Ring):
        def split(self, x):
            return know(super().split(x))

        def pass_on(self, hop, leaving, k, grad_dtype=None):
            coming, wait = super().pass_on(hop, know(leaving), k, grad_dtype)
            return know(coming), wait

    return KnowingRing


class RingRecorder(Meter):
    """This rank's hops in each layer, of a forward or a backward a list.

    A hop: which chunks' keys and values it `holds`; what it `computes`, [chunk of queries, chunk of
    keys, pairs of a query and a key that it sees]; what it `sends`, [chunk, to whom, bytes]; and
    of `gradients` of keys and values the same. Which chunk a tensor is, its address tells.
    """

    def __init__(self):
        super().__init__()
        self.layers, self.chunks, self.what = {"forward": [], "backward": []}, {}, None

    def wrapped(self):
        """A context, in which the task's script calls what is below."""
        recorder = self

        class WatchedRing(knowing(self.chunks)):
            def pass_on(self, hop, leaving, k, grad_dtype=None):
                recorder.hop(self, hop, leaving, grad_dtype)
                return super().pass_on(hop, leaving, k, grad_dtype)

        return mock.patch.multiple(
            ring_attention, Ring=WatchedRing,
            build_ring=ring_attention.build_ring.__wrapped__,  # keeps none, watched or not
            exchange=partial(self.exchange, exchange),
            attend=partial(self.block, attend, 0),
            attend_backward=partial(self.block, attend_backward, 1),
            ring_forward=partial(self.layer, ring_forward, "forward"),
            ring_backward=partial(self.layer, ring_backward, "backward"),
        )  # fmt: skip

    def layer(self, function, phase, *args):
        """All hops of a layer, in the place of `ring_forward` or `ring_backward`."""
        self.layers[phase].append([])
        self.hops = self.layers[phase][-1]
        return function(*args)

    def hop(self, ring, hop, leaving, grad_dtype):
        """One begins, of keys and values; or, behind its blocks, of their gradients."""
        self.what, self.tokens = "gradients" if grad_dtype else "sends", ring.tokens
        if grad_dtype:
            self.hops[-1]["gradients"] = []
        else:
            self.hops.append({"hop": hop, "holds": [*leaving], "computes": [], "sends": []})

    def block(self, function, first, *args):
        """Attention, or its backward, whose arguments from the `first` on are q, k, ..."""
        q, k = args[first : first + 2]
        n, m, causal = q.shape[2], k.shape[2], args[-2]
        pair = self.chunks[q.data_ptr()], self.chunks[k.data_ptr()]
        self.hops[-1]["computes"].append([*pair, n * (n + 1) // 2 if causal else n * m])
        return function(*args)

    def exchange(self, function, sends, receives, group):
        """What a hop sends."""
        told = [[self.chunks[x.data_ptr()], to, x.nbytes] for x, to in sends]
        self.hops[-1][self.what] += told
        return function(sends, receives, group)

    def count(self, name, tensor, sent):
        """A message, or a collective, which is not the ring's."""
        self.sent += sent * (name == "c10d::send")

    def one_layer(self):
        """[(phase, hop), ...], of the layers only the first one's; the others' are the same."""
        hops = [(phase, hop) for phase, layers in self.layers.items() for hop in layers[0]]
        sent = sum(nbytes for _, hop in hops for kind in ("sends", "gradients")
                   for *_, nbytes in hop.get(kind, []))  # fmt: skip
        for layers in self.layers.values():
            assert all(layer == layers[0] for layer in layers), "layers differ"
        assert self.sent == sent * len(layers), "messages that are not told of"
        return hops


def record_ring(run, mesh, zigzag, reference, ids):
    """A step of a model whose attention is a ring; of its layers one."""
    model = run.load_model(partial(ring_parallelize, mesh=mesh, zigzag=zigzag))
    recorder = RingRecorder()
    with recorder.wrapped():
        loss = step(model, recorder, partial(sum_gradients, mesh=mesh), ids)
    check(run, "loss", loss, reference, ids)
    everyone = run.gather_objects(recorder.one_layer())
    return {
        "tokens": [[part.start, part.stop] for part in recorder.tokens],  # of each chunk
        "formula": comm_bytes_per_layer(model, *ids.shape),  # forward, backward
        "hops": [{"phase": phase, "rank": rank} | hop for same in zip(*everyone, strict=True)
                 for rank, (phase, hop) in enumerate(same)],
    }  # fmt: skip


# ---------------------------------------------------------------- a mesh


class MeshRecorder(Recorder):
    """As its base; each collective with its `axis`. And what this rank `holds` of activations.

    That is: the `tokens` that its norms see, found by their values; the query and KV heads
    (start, stop) that it computes, `made`, and those that it attends with, `attended`.
    """

    def __init__(self, model, mesh, embedded, holds):
        """embedded: of all tokens what goes into the first layer, (B, S, H). holds: {} to fill."""
        super().__init__(model)
        members = {axis: mesh[axis].get_group() for axis in mesh.mesh_dim_names}
        self.axes = {tuple(dist.get_process_group_ranks(g)): axis for axis, g in members.items()}
        self.embedded, self.holds = embedded, holds
        self.embedding()
        attention = model.model.layers[0].self_attn
        weights = attention.q_proj.weight, attention.k_proj.weight
        made = [[end // attention.head_dim for end in (part.start, part.stop)]
                for part in (shard_of(weight)[0] for weight in weights)]  # fmt: skip
        attended = attention.heads[attention.get_group().rank()]
        pairs = zip(made, attended, strict=True)
        holds["made"] = made
        holds["attended"] = [[first + start, first + stop] for (first, _), (start, stop) in pairs]

    def embedding(self, grad=None):
        """All begins here, and ends. (With Megatron's tokens its rows are taken without a call.)"""
        self.at = "embed_tokens"

    def begin(self, name, module, args):
        super().begin(name, module, args)
        if name == "layers.0.input_layernorm":
            args[0].register_hook(self.embedding)
            apart = (args[0][:, :, None] - self.embedded[:, None]).abs().amax((0, 3))
            at = apart.argmin(1).tolist()
            assert at == [*range(at[0], at[-1] + 1)], at
            self.holds["tokens"] = [at[0], at[-1] + 1]

    def count(self, name, tensor, sent):
        super().count(name, tensor, sent)
        self.events[-1] |= {
            "axis": self.axes[tuple(dist.get_process_group_ranks(group_here()))],
            "asked_by": self.events[-1]["asked_by"] or "a norm",  # whose gradient's hook it is
        }


def group_here():
    """The process group that the collective in the call stack was called with."""
    frame = sys._getframe(1)
    while not isinstance(frame.f_locals.get("group"), dist.ProcessGroup):
        frame = frame.f_back
    return frame.f_locals["group"]


def record_mesh(run, mesh, megatron_sp, reference, ids):
    """A step on both axes."""
    holds, whole = {}, run.broadcast(reference and reference.model.embed_tokens.weight)
    watch = partial(MeshRecorder, mesh=mesh, embedded=F.embedding(ids, whole), holds=holds)
    parallelize = partial(parallelize_tp_sp, mesh=mesh, megatron_sp=megatron_sp)
    told = record(run, parallelize, partial(sum_gradients, mesh=mesh["sp"]), reference, ids, watch)
    return told["parameters"], {
        "ranks": run.gather_objects(holds),
        "events": [event for event in told["events"] if "collective" in event],
    }


def measure(run, args):
    """Rings of all ranks, and meshes of 2 x 2."""
    if run.world_size != 4:
        raise UserError(f"{run.world_size} rank(s): the pictures are of 4")
    reference, ids = begin(run, args)
    run.results["ring"] = {
        layout: record_ring(run, run.mesh("sp"), zigzag, reference, ids)
        for layout, zigzag in LAYOUTS.items()
    }
    mesh = run.mesh_2d("sp", "tp", 2)
    held, told = zip(*(record_mesh(run, mesh, megatron_sp, reference, ids)
                       for megatron_sp in VARIANTS.values()), strict=True)  # fmt: skip
    assert held[0] == held[1]
    run.results["mesh"] = {"sp x tp": mesh.mesh.tolist(), "parameters": held[0]}
    run.results["mesh"] |= dict(zip(VARIANTS, told, strict=True))


if __name__ == "__main__":
    main(__file__, __doc__, 4, measure)
