"""Neighbour course: data parallelism. Every rank takes other samples, and all take the same step.

Each rank computes the gradients of its part of a batch. Their average over the ranks is that of the
whole batch's mean loss, if each goes back from the right share of it (`forward_backward`). What a
rank has after a step and sends in one, of P ranks and W bytes of weights:

                weights     gradients   Adam's states   bytes sent
    by-hand     W           W           2 W             2 (P-1)/P W, after the backward
    ddp         W           W           2 W             2 (P-1)/P W, during the backward
    zero1       W           W           2 W / P         3 (P-1)/P W; each parameter's on one rank
    fsdp2       W / P       W / P       2 W / P         3 (P-1)/P W; a layer whole while it runs

(PyTorch's ZeRO-1 sums all gradients on all ranks; the paper's scatters them, and sends 2. FSDP2's
embedding, last norm and head stay whole until the backward, and are sent twice. DDP: arXiv
2006.15704, section 3. ZeRO: arXiv 1910.02054, section 5. FSDP: arXiv 2304.11277.)

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 tasks/data_parallel.py

checks each against a single-rank run of the unmodified model, and trains with it. Plain

    python tasks/data_parallel.py --spawn 2

starts processes as the course does, which write their gradients to files, and compares these.
"""

import os
import random
import tempfile
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from utils.batches import Batches, check_partitions, gather_batch, join, pad, read_samples
from utils.checkpoint import fingerprint
from utils.collectives import all_reduce, check_mesh, group_of_axis, sum_in_place
from utils.epochs import estimate, expect_training, print_workers, train
from utils.errors import UserError
from utils.flags import make_parser, natural, positive, rate
from utils.job import start
from utils.model_checks import token_losses
from utils.shards import shard_range
from utils.step_checks import Reference, check_copies

# ---------------------------------------------------------------- the technique: data


class Partition(Dataset):
    """The samples of `data` at the places `index`."""

    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


class DataPartitioner:
    """Deals the samples of `data`, shuffled, to partitions of these sizes, shares of 1.

    Each sample is in one partition: what is rounded is where a partition ends. The generator is of
    its own, so that all ranks deal alike whatever else they draw. ValueError for other sizes.
    """

    def __init__(self, data, sizes=(0.7, 0.2, 0.1), seed=1234):
        if min(sizes) < 0 or abs(sum(sizes) - 1) > 1e-6:
            raise ValueError(f"sizes of partitions must be 0 or more, and add up to 1: {sizes}")
        index = list(range(len(data)))
        random.Random(seed).shuffle(index)
        ends = [round(share * len(data)) for share in accumulate(sizes, initial=0)]
        self.data, self.parts = data, [index[i:j] for i, j in pairwise(ends)]

    def use(self, partition):
        return Partition(self.data, self.parts[partition])


def partition_dataset(rank, world_size, dataset, batch_size=128, collate_fn=None):
    """A rank's samples, in batches of its share of batch_size: a DataLoader.

    Where shares are unequal, so are the partitions: all ranks come to their ends together, but for
    the last batches, of which some ranks may have none. ValueError for a batch of fewer than ranks.
    """
    if batch_size < world_size:
        raise ValueError(f"a batch of {batch_size} samples, but {world_size} ranks")
    ranges = [shard_range(batch_size, world_size, r) for r in range(world_size)]
    shares = [stop - first for first, stop in ranges]
    partitioner = DataPartitioner(dataset, [share / batch_size for share in shares])
    return DataLoader(partitioner.use(rank), shares[rank], collate_fn=collate_fn)


# ---------------------------------------------------------------- the technique: gradients


def average_gradients(model, mesh):
    """Every gradient becomes its mean over the ranks of a mesh of one axis, in place.

    Between the backward and the optimizer; the same bits on all ranks. With several microbatches,
    once after the last backward or after each: the mean of what is a mean already is the same.
    A parameter that some ranks did not use counts as 0 there; one that no rank used keeps no
    gradient. DTensors may be split over another axis; of this one, `check_mesh` raises ValueError.
    """
    group = group_of_axis(mesh)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return
    check_mesh(parameters, group)
    used = torch.tensor([parameter.grad is not None for parameter in parameters]).float()
    used = all_reduce(used.to(parameters[0].device), group)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sum_in_place([parameter.grad for parameter in parameters], group)
    for parameter in parameters:
        parameter.grad /= mesh.size()


def forward_backward(model, batch, group):
    """Of this rank's samples: its part of the mean loss over all ranks' labels, and the logits.

    batch: ids, mask and labels, (b, S) each. The mean of the ranks' means would weigh a label by
    how many others are on its rank. So each rank goes back from P times its part: what is averaged
    then is the gradient of the mean over all labels.
    """
    ids, mask, labels = batch
    count = all_reduce((labels[:, 1:] != -100).sum(), group)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    part = token_losses(logits, labels).sum() / count
    (group.size() * part).backward()
    return part.detach(), logits.detach()


def shard_fully(model, mesh):
    """FSDP2, in place: each layer's parameters, and all others, as slices; also on device meta."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Replica:
    """A Llama of which each rank of a mesh of one axis takes a step with samples of its own.

    `model` has the parameters and their names; `called` is what a forward goes through.
    """

    def __init__(self, run, strategy, mesh):
        self.strategy, self.mesh, self.group = strategy, mesh, group_of_axis(mesh)
        if strategy == "fsdp2":  # each rank reads its slices; .to() makes FSDP2 look for them
            self.model = run.load_model(partial(shard_fully, mesh=mesh)).to(run.device)
            run.print0(str(self.model))
        else:
            self.model = run.load_model()
        self.called = self.model
        if strategy in ("ddp", "zero1"):
            once = {"gradient_as_bucket_view": True}  # else it has all gradients twice
            self.called = DistributedDataParallel(self.model, process_group=self.group, **once)

    def step(self, batch):
        """`forward_backward`, and then the gradients are averages."""
        result = forward_backward(self.called, batch, self.group)
        if self.strategy == "by-hand":
            average_gradients(self.model, self.mesh)
        return result

    @torch.no_grad()
    def logits(self, ids, mask):
        logits = self.called(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if self.strategy == "fsdp2":
            self.model.reshard()  # else embedding and head stay whole until a backward
        return logits

    def optimizer(self, parameters, kind=torch.optim.SGD, **settings):
        if self.strategy == "zero1":
            return ZeroRedundancyOptimizer(parameters, kind, self.group, **settings)
        return kind(parameters, **settings)


STRATEGIES = "by-hand", "ddp", "zero1", "fsdp2"

# ---------------------------------------------------------------- as the course starts it


def setup(rank, world_size, backend, port=11868):
    """Join the other processes of this machine."""
    print(f"Starting worker {rank}/{world_size} with master address localhost:{port}", flush=True)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def compute_gradients(rank, world_size, backend, port, load_model, batches, folder):
    """What each process does: its averaged gradients become a file."""
    setup(rank, world_size, backend, port)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    model, batch = load_model(device), [tensor.to(device) for tensor in batches[rank]]
    forward_backward(model, batch, group_of_axis(mesh))
    average_gradients(model, mesh)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    save_file(grads, f"{folder}/model{rank}_gradients.safetensors")
    dist.destroy_process_group()


def compare_processes(run, number, train_data, batch_size, collate):
    """Start so many, and hold their files against each other and the single rank's gradients."""
    loaders = [partition_dataset(r, number, train_data, batch_size, collate) for r in range(number)]
    batches = [next(iter(loader), collate([])) for loader in loaders]
    reference = Reference(run, [tensor.to(run.device) for tensor in join(batches)])
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    load_model, model = partial(run.source.load_model, run.dtype), run.load_model()
    with tempfile.TemporaryDirectory() as folder:
        args = number, backend, get_free_port(), load_model, batches, folder
        multiprocessing.spawn(compute_gradients, args, number)
        files = [load_file(f"{folder}/model{rank}_gradients.safetensors") for rank in range(number)]
    for rank, grads in enumerate(files):
        pairs = [(grads[name], grad) for name, grad in files[0].items()]
        run.check(f"process {rank}: the gradients' bits are process 0's", pairs, tolerance=0.0)
    for name, parameter in model.named_parameters():
        parameter.grad = files[0][name].to(run.device)
    reference.compare_gradients(run, "processes", model)


# ---------------------------------------------------------------- what is shown with it


def main():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--strategy", choices=["all", *STRATEGIES], default="all", help="default all of them")
    add("--batch-size", type=positive, default=8, help="sequences, of all ranks; default 8")
    add("--seq-len", type=positive, default=64, help="tokens of the longest; default 64")
    add("--num-sequences", type=positive, default=40, help="7 of 10 to train on; default 40")
    add("--epochs", type=natural, default=2, help="of training, after the checks; default 2")
    add("--lr", type=rate, default=1e-4, help="AdamW's learning rate; default 1e-4")
    add("--text", help="a file, plain or JSON lines, or a URL; default own stories, or a book")
    add("--tokenizer", help="tokenizer.json or its folder, see pretrain_2d.py; default the model's")
    add("--spawn", type=positive, help="so many processes, without torchrun; default none")
    add("--estimate", action="store_true", help="say what memory it wants, and stop; default no")
    start(parser.parse_args(), show)


def show(run, args):
    """All checks of each strategy, and its training."""
    run.mark, P, B, S = "D", run.world_size, args.batch_size, args.seq_len
    estimate(run, B, S)
    if args.estimate:
        return
    if B < (ranks := args.spawn or P):  # noqa: SIM300
        raise UserError(f"--batch-size {B}: fewer sequences than {ranks} ranks")
    if args.spawn and P > 1:
        raise UserError("--spawn starts processes itself: without torchrun")
    if args.spawn and run.device.type == "cuda" and ranks > torch.cuda.device_count():
        raise UserError(f"--spawn {ranks}: more than there are GPUs; use --device cpu")
    data = read_samples(run, args.num_sequences, S, args.text, args.tokenizer)
    collate = partial(pad, size=S)
    parts = [DataPartitioner(data).use(i) for i in range(2)]
    if not all(map(len, parts)):
        raise UserError(f"--num-sequences {args.num_sequences}: {len(parts[0])} to train on and "
                        f"{len(parts[1])} to validate; each needs one")  # fmt: skip
    if args.spawn:
        return compare_processes(run, args.spawn, parts[0], B, collate)
    print_workers(run)
    loaders = [partition_dataset(run.rank, P, part, B, collate) for part in parts]
    mesh, batches = run.mesh("dp"), [Batches(run, loader, collate) for loader in loaders]
    check_partitions(run, data, parts, batches)
    *_, last = batches[0]  # of which ranks may have unequal numbers of sequences, or none
    mine, whole = gather_batch(run, last)
    reference = Reference(run, whole)
    expected = expect_training(run, reference, batches, args.epochs, args.lr)
    for strategy in STRATEGIES if args.strategy == "all" else [args.strategy]:
        replica, unsplit = Replica(run, strategy, mesh), () if strategy == "fsdp2" else ("",)
        run.check_weights(strategy, replica.model, reference.models, whole=unsplit)
        if strategy == "by-hand":
            check_average(run, replica, next(iter(batches[0])))
        step, embedding = partial(replica.step, last), replica.model.model.embed_tokens
        reference.check_step(run, strategy, replica.model, step, embedding,
                             rows=mine, times=P, optimizer=replica.optimizer)  # fmt: skip
        if args.epochs:
            train(run, strategy, replica, batches, args.epochs, args.lr, expected, reference.own)
        del replica, step, embedding  # before the next one's


def check_average(run, replica, batch):
    """Before the average, each rank's gradients are its own; after it, all have the same bits."""
    forward_backward(replica.model, batch, replica.group)
    grads = [parameter.grad for parameter in replica.model.parameters()]
    samples, own = (len(set(run.gather_objects(fingerprint(of)))) for of in (batch, grads))
    same = torch.tensor(float(samples - own))
    run.check("by-hand: ranks with the same gradients before the average", [(same, 0 * same)], 0.0)
    average_gradients(replica.model, replica.mesh)
    check_copies(run, "by-hand: copies of a gradient, averaged", replica.model, lambda p: p.grad)
    replica.model.zero_grad()


if __name__ == "__main__":
    main()
