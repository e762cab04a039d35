"""The tensor parallelisms that are compared: Task 2's, Task 3's, transformers' own, and by gloo."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from dtensor_llama import dtensor_parallelize
from kv_cache import choose_among_ranks, choose_from_full_logits
from shared_memory.traffic import bytes_sent
from tp_llama import tensor_parallelize


def mesh_by_gloo(device_type):
    """A mesh of all ranks like `Run.mesh`, but by gloo, and so with another name.

    Meshes of the same ranks and names are equal, whatever their groups, and DTensor's caches are by
    mesh: without that name the second would talk through the first one's group. (transformers'
    plan makes one called tp.)
    """
    gloo = dist.new_group(backend="gloo")
    return DeviceMesh.from_group(gloo, device_type, mesh_dim_names=("tp_gloo",))


class Single:
    """The unmodified model, rank 0's alone."""

    def __init__(self, run, mesh=None):
        self.run, self.mesh = run, mesh

    choose = staticmethod(choose_from_full_logits)
    context = staticmethod(contextlib.nullcontext)


class HandMade(Single):
    """Task 2: f, g and a vocabulary-parallel loss, written out."""

    def parallelize(self, model):
        tensor_parallelize(model, self.mesh)

    choose = staticmethod(choose_among_ranks)

    @staticmethod
    def formula(L, T, H, V, P, e):
        """Bytes each rank sends forward and backward, e to an element, for P up to the KV heads.

        An all-reduce sends 2 (P-1)/P of its size. The loss is taken in float32 or wider.
        """
        all_reduce = 2 * (P - 1) / P * T * H * e
        # Forward: g behind two blocks a layer and the embedding, 3 numbers a token for the loss.
        # Backward: f in front of two blocks a layer and the LM head.
        return (2 * L + 1) * all_reduce + (P - 1) * 3 * T * max(e, 4), (2 * L + 1) * all_reduce


class DTensorPlan(HandMade):
    """Task 3: parallelize_module, and loss_parallel."""

    def parallelize(self, model):
        dtensor_parallelize(model, self.mesh)

    context = staticmethod(loss_parallel)

    choose = staticmethod(choose_from_full_logits)

    @staticmethod
    def formula(L, T, H, V, P, e):
        """As by hand, but the loss all-reduces three numbers a token."""
        forward, backward = HandMade.formula(L, T, H, V, P, e)
        return forward + (6 / P - 3) * (P - 1) * T * max(e, 4), backward


class TransformersPlan(HandMade):
    """transformers' tp_plan="auto"."""

    def parallelize(self, model):
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=self.run.world_size, tp_plan="auto")
        config, _, meshes = model.prepare_distribute_model(config)
        usual = meshes.get_mesh
        meshes.get_mesh = lambda name: self.mesh if name == "tp" else usual(name)
        embedding, head = model.model.embed_tokens, model.lm_head
        tied = head.weight is embedding.weight
        if tied:  # it wants to split them one by one
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
        model.maybe_distribute_model(model, config, meshes)
        if tied:
            head.weight = embedding.weight

    choose = staticmethod(choose_from_full_logits)

    @staticmethod
    def formula(L, T, H, V, P, e):
        """Each of five projections a layer has its own f; the loss is taken of gathered logits."""
        forward, backward = HandMade.formula(L, T, H, V, P, e)
        largest = -(-V // P)  # shares are padded to be gathered
        logits = (P - 1) * T * largest * e - (P - 1) * 3 * T * max(e, 4)
        return forward + logits, backward * (5 * L + 1) / (2 * L + 1)


TECHNIQUES = {"hand-made": HandMade, "DTensor": DTensorPlan, "transformers": TransformersPlan}
BY_GLOO = {f"{name}, gloo": technique for name, technique in TECHNIQUES.items()}


def split(run, techniques):
    """{name: technique} and {name: model on this rank}; by gloo, of the same weights."""
    own = run.mesh("tp_own")
    gloo = mesh_by_gloo(run.device.type) if BY_GLOO.keys() & set(techniques) else None
    made = {
        name: BY_GLOO[name](run, gloo) if name in BY_GLOO else TECHNIQUES[name](run, own)
        for name in techniques
    }
    models = {}
    for name, technique in made.items():
        models[name] = run.load_model(technique.parallelize)
        if (other := name.removesuffix(", gloo")) != name and other in models:
            pairs = zip(*(local_weights(models[n]) for n in (name, other)), strict=True)
            for weight, same in pairs:
                weight.data = same.data
    few = torch.zeros(1, 8, dtype=torch.long, device=run.device)
    for name, model in models.items():
        with torch.no_grad():
            counted, wire = bytes_sent(run, partial(model, few), made[name].mesh.get_group())
        # By gloo it must be, and not through another contender's group: see `mesh_by_gloo`.
        assert wire is None or wire > 0.9 * counted, (name, counted, wire)
    return made, models


def local_weights(model):
    """The tensors that a model (None: has none) keeps on this rank."""
    return [getattr(w, "_local_tensor", w) for w in model.parameters()] if model else []
