"""The pipelines' parts: schedules, stages, threads; and what cannot be run."""

import copy
import os
import queue
import re
import sys
import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

import launch
import pipeline_threads
from failing import FailsBack
from figures.bench import report
from loading.architectures import LLAMA_AND_GPT2
from loading.models import Source
from pages import same
from pipeline_llama import gpipe, keep_stage, one_forward_one_backward, run_by_hand
from pipeline_threads import (
    ModelParallel,
    Pipe,
    WithDevice,
    create_workers,
    device_of,
    hidden_states,
    one_after_the_other,
    split_module,
)
from utils import point_to_point
from utils.errors import UserError
from utils.stages import balance, clock_cycles

CPU = [torch.device("cpu", i) for i in range(3)]
GPT2 = "random/gpt2-small-test"


def test_clock_cycles():
    """Each (microbatch, stage) once, tick by tick, behind what it needs."""
    assert list(clock_cycles(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    assert list(clock_cycles(2, 3))[1:4] == [[(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    for m, p in (1, 1), (1, 4), (5, 1), (4, 4), (2, 5):
        ticks = list(clock_cycles(m, p))
        assert all(i + j == tick for tick, pairs in enumerate(ticks) for i, j in pairs)
        assert sorted(pair for pairs in ticks for pair in pairs) == [
            (i, j) for i in range(m) for j in range(p)
        ]


def test_schedules():
    """As the docstring draws them; 1F1B keeps p - stage microbatches at most, GPipe all."""

    def text(order):
        return " ".join(f"{kind}{i}" for kind, i in order)

    assert text(gpipe(4, 2, 0)) == text(gpipe(4, 2, 1)) == "F0 F1 F2 F3 B3 B2 B1 B0"
    assert text(one_forward_one_backward(4, 2, 0)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(one_forward_one_backward(4, 2, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    for m, p in (1, 3), (2, 4), (7, 3):
        for stage in range(p):
            order, kept, most = one_forward_one_backward(m, p, stage), 0, 0
            for kind, _ in order:
                kept += 1 if kind == "F" else -1
                most = max(most, kept)
            assert sorted(order) == [(kind, i) for kind in "BF" for i in range(m)]
            assert most == min(m, p - stage)


def test_balance():
    """The dearest stage is as cheap as it can be, and no stage is empty."""
    assert balance([1.0] * 6, 3) == (2, 4, 6)
    assert balance([1.0, 1, 1, 5], 2) == (3, 4)
    assert balance([9.0, 1, 1, 1], 3) == (1, 2, 4)
    for stages in range(1, 6):
        stops = balance([1.0, 2, 3, 4, 5], stages)
        assert len(stops) == stages and stops[-1] == 5
        assert all(a < b for a, b in pairwise((0, *stops)))
    with pytest.raises(UserError, match="6 stages, but only 5 layers"):
        balance([1.0] * 5, 6)
    with pytest.raises(ValueError, match="0 stages"):
        balance([1.0] * 5, 0)


def test_split_module():
    """Neighbours on one device are one partition; a label says where, on CPUs."""
    first, second, third = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
    partitions, devices = split_module(nn.Sequential(first, second, third))
    assert [len(part) for part in partitions] == [3] and devices == [torch.device("cpu")]
    labelled = [WithDevice(m, d) for m, d in ((first, CPU[0]), (second, CPU[0]), (third, CPU[1]))]
    partitions, devices = split_module(nn.Sequential(*labelled))
    assert [list(part) for part in partitions] == [[first, second], [third]]
    assert devices == CPU[:2]
    assert torch.equal(labelled[0](torch.ones(1, 2)), first(torch.ones(1, 2)))
    with pytest.raises(ValueError, match="several devices"):
        device_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_output_is_on_the_last_device():
    """On the second GPU; where there are no two, on `meta`, whose tensors have no values."""
    two_gpus = torch.cuda.device_count() > 1
    first, last = map(torch.device, ("cuda:0", "cuda:1") if two_gpus else ("cpu", "meta"))
    pipe = Pipe(nn.Sequential(nn.Linear(4, 6, device=first), nn.Linear(6, 3, device=last)), 2)
    assert pipe.devices == [first, last]
    y = pipe(torch.ones(5, 4, device=first))
    assert y.device == last and y.shape == (5, 3)
    with torch.no_grad():
        assert pipe(torch.ones(5, 4, device=first)).device == last


def stack(layers=6):
    torch.manual_seed(0)
    sizes = [(WithDevice(nn.Linear(8, 8), CPU[i * 3 // layers])) for i in range(layers)]
    return nn.Sequential(*sizes).double()


def step(module, x):
    """Its output, and the gradients of x and of its parameters."""
    module.zero_grad()
    own = x.clone().requires_grad_(x.is_floating_point())
    y = module(own)
    (y**2).sum().backward()
    return [y.detach(), own.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(expected, results):
    """None where there is no gradient, and equal but for rounding elsewhere."""
    for one, other in zip(expected, results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_names_of_the_homework(monkeypatch):
    """Its functions, by its names and signatures; the forward goes through `Pipe.compute`."""
    assert list(pipeline_threads._clock_cycles(3, 2)) == list(clock_cycles(3, 2))
    whole, x, calls = stack(), torch.randn(9, 8, dtype=torch.float64), []
    partitions, devices = pipeline_threads._split_module(whole)
    assert [len(part) for part in partitions] == [2, 2, 2] and devices == CPU
    in_queues, out_queues = create_workers([CPU[0], CPU[1], CPU[0]])
    assert in_queues[0] is in_queues[2] is not in_queues[1] and len(out_queues) == 3
    in_queues[1].put(pipeline_threads.Task(threading.get_ident))
    done, thread = out_queues[1].get(timeout=60)
    assert done and thread != threading.get_ident()
    pipe, compute = Pipe(whole, split_size=2), Pipe.compute
    batches = list(x.split(2))  # by hand, a tick at a time: autograd alone goes back
    for schedule in pipeline_threads._clock_cycles(num_batches=5, num_partitions=3):
        pipe.compute(batches, schedule)
    whole.zero_grad()
    (torch.cat(batches) ** 2).sum().backward()
    by_hand = [torch.cat(batches).detach(), *(p.grad.clone() for p in whole.parameters())]
    monkeypatch.setattr(
        Pipe, "compute", lambda self, *args: calls.append(args[1]) or compute(self, *args)
    )
    y, _, *grads = step(pipe, x)
    assert_same([y, *grads], by_hand)
    assert calls == list(clock_cycles(5, 3))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_in_a_sequential(tied):
    """Logits and gradients of the unmodified model, a batch in one piece and by a pipeline."""
    source = Source(GPT2, model_types=LLAMA_AND_GPT2)
    source.config.tie_word_embeddings = tied
    source.shapes |= {} if tied else {"lm_head.weight": source.shapes["transformer.wte.weight"]}
    expected, model = (source.load_model(torch.float64, torch.device("cpu")) for _ in range(2))
    ids = torch.arange(7 * 9).view(7, 9)
    logits = expected(ids).logits
    logits.square().mean().backward()
    model.config.tie_word_embeddings = not tied  # it is the weights that count
    split = ModelParallel(model, (1, 3, 4), CPU)
    blocks = [module.module for module in split.sequential[1:-1]]
    assert len(blocks) == 4 and torch.is_tensor(blocks[0](torch.zeros(1, 2, 32).double()))
    for size in None, 2:
        if size:
            split._prepare_pipeline_parallel(size)
        assert isinstance(split.pipe, Pipe) == bool(size)
        model.zero_grad()
        y = split(ids)
        y.square().mean().backward()
        split.sum_tied()
        torch.testing.assert_close(y, logits, rtol=0, atol=1e-12)
        for name, parameter in expected.named_parameters():
            grad = model.get_parameter(name).grad
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-12)


def tiny(**changes):
    source = Source("tiny")
    for name, value in changes.items():
        setattr(source.config, name, value)
    return source.load_model(torch.float64, torch.device("cpu"))


def test_stops_that_leave_out_layers():
    """Of a model in one process, and of stages: each layer is in one of them."""
    for stops in (2, 4, 4), (2, 4, 6), (2, 1, 5), (0, 2, 5), (2, 2, 5):
        with pytest.raises(ValueError, match="they do not divide 5 layers"):
            ModelParallel(tiny(), stops, CPU)
        with pytest.raises(ValueError, match="they do not divide 5 layers"):
            keep_stage(tiny(), stops, 0)
    for stops in (5,), (1, 2, 3, 5), ():
        with pytest.raises(ValueError, match=f"{len(stops)} stages for 3 devices"):
            ModelParallel(tiny(), stops, CPU)


def test_attention_that_needs_a_mask():
    """It would see the future, or more than its window."""
    model = tiny()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager attention needs a mask"):
        ModelParallel(model, (2, 3, 5), CPU)
    model = tiny()
    model.config.sliding_window = 4
    with pytest.raises(ValueError, match="a sliding window"):
        ModelParallel(model, (2, 3, 5), CPU)


def test_copies_of_a_tied_embedding():
    """Frozen they stay frozen; a sum of sums is refused; a second wrapper knows of the first."""
    ids = torch.arange(4 * 9).view(4, 9)
    whole, model = tiny(), tiny()
    frozen = tiny()
    frozen.model.embed_tokens.weight.requires_grad_(False)
    split = ModelParallel(frozen, (2, 3, 5), CPU)
    split(ids).square().mean().backward()
    split.sum_tied()
    assert not frozen.lm_head.weight.requires_grad and frozen.lm_head.weight.grad is None
    ModelParallel(model, (2, 3, 5), CPU)
    split = ModelParallel(model, (1, 2, 5), CPU)
    for turn in range(2):
        for rows in ids.split(2):
            split(rows).square().mean().backward()
            whole(rows).logits.square().mean().backward()
        split.sum_tied()
        expected = whole.lm_head.weight.grad
        for copied in model.lm_head, model.model.embed_tokens:
            torch.testing.assert_close(copied.weight.grad, expected, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="sums of both copies"):
            split.sum_tied()
        with pytest.raises(ValueError, match="added to gradients that are sums"):
            split(ids).square().mean().backward()
        for one in whole, model:
            one.zero_grad(set_to_none=bool(turn))


class Network:
    """Messages as NCCL runs them: all of a rank's in a group in the order of its calls.

    A message begins when it is the next one of both ranks. It holds none back: whoever sends waits.
    """

    def __init__(self, timeout):
        self.moved, self.streams, self.timeout = threading.Condition(), {}, timeout
        self.local = threading.local()  # rank: of this thread

    def isend(self, tensor, group, group_dst):
        return self.post(group, "send", group_dst, tensor)

    def irecv(self, tensor, group, group_src):
        return self.post(group, "receive", group_src, tensor)

    def get_backend(self, group):
        return "nccl"

    def post(self, group, kind, peer, tensor):
        message = SimpleNamespace(kind=kind, peer=peer, tensor=tensor, is_done=False)
        message.wait = partial(self.wait, message)
        message.is_completed = lambda: message.is_done
        with self.moved:
            self.streams.setdefault((group, self.local.rank), []).append(message)
            while self.advance():
                self.moved.notify_all()
        return message

    def advance(self):
        """Run one message; return whether there was one."""
        for (group, rank), stream in self.streams.items():
            other = stream and self.streams.get((group, stream[0].peer))
            if not other or (stream[0].kind, other[0].kind) != ("send", "receive"):
                continue
            if other[0].peer == rank:
                other[0].tensor.copy_(stream[0].tensor)
                stream.pop(0).is_done = other.pop(0).is_done = True
                return True
        return False

    def wait(self, message):
        with self.moved:
            if not self.moved.wait_for(message.is_completed, self.timeout):
                raise TimeoutError


class StageOfSums(nn.Module):
    """A stage of a pipeline as small as can be: 2 tokens, hidden size 3."""

    def __init__(self, index, ranks):
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == ranks - 1
        self.weight, self.config = nn.Parameter(torch.ones(3)), SimpleNamespace(hidden_size=3)

    def forward(self, x, mask):
        return self.weight * (x[..., None].float().expand(-1, -1, 3) if self.is_first else x)


def run_on_network(monkeypatch, schedule, ranks, count, groups, timeout):
    """Run a step in `ranks` threads; return {rank: (losses, gradient)}, or raise TimeoutError."""
    network, results = Network(timeout), {}
    monkeypatch.setattr(point_to_point, "dist", network)
    one = torch.ones(1, 2)

    def rank_of(rank):
        network.local.rank = rank
        stage, order = StageOfSums(rank, ranks), schedule(count, ranks, rank)
        try:
            batch = [(one, one, one)] * count
            losses, _ = run_by_hand(stage, order, batch, lambda y, _: y.sum(), *groups)
            results[rank] = torch.tensor(losses), stage.weight.grad
        except TimeoutError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_of, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in results.values():
        if isinstance(error, TimeoutError):
            raise error
    return results


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_messages_in_the_order_of_calls(schedule, monkeypatch):
    """No rank waits for ever, though NCCL runs a rank's messages in a group one by one."""
    for ranks, count in (1, 3), (2, 3), (3, 3), (3, 8), (4, 2), (4, 4), (4, 9), (5, 8):
        groups = ("down", "down 2"), ("up", "up 2")
        results = run_on_network(monkeypatch, schedule, ranks, count, groups, 60)
        assert torch.equal(results[ranks - 1][0], torch.full([count], 6.0))
        for _, grad in results.values():
            assert torch.equal(grad, torch.full([3], 2.0 * count))
    if schedule is one_forward_one_backward:  # with fewer groups they would
        with pytest.raises(TimeoutError):
            groups = ("down", "down"), ("up", "up")
            run_on_network(monkeypatch, schedule, 4, 8, groups, 2)


def test_hidden_states():
    """Of a layer of either generation of the library."""
    x = torch.ones(2)
    assert hidden_states(x) is hidden_states((x,)) is hidden_states((x, None)) is x


@pytest.mark.parametrize("stops", [(4,), (1, 4), (1, 3, 4)])
def test_stages_of_gpt2(stops):
    """One after the other they are the model, with padding; positions are added once."""
    source, cpu = Source(GPT2, model_types=LLAMA_AND_GPT2), torch.device("cpu")
    whole = source.load_model(torch.float64, cpu)
    stages = [source.load_model(torch.float64, cpu, lambda m, i=i: keep_stage(m, stops, i))
              for i in range(len(stops))]  # fmt: skip
    ids, mask = torch.arange(3 * 8).view(3, 8), torch.ones(3, 8, dtype=torch.long)
    mask[1, :3] = 0
    x = ids
    for stage in stages:
        x = stage(x, mask)
    logits = whole(ids, attention_mask=mask).logits
    torch.testing.assert_close(x[mask == 1], logits[mask == 1], rtol=0, atol=1e-12)
    for y in x, logits:
        y[mask == 1].square().mean().backward()
    found = {}
    for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
        found[name] = found.get(name, 0) + parameter.grad  # a tied embedding has two copies
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", report.MORE["pipeline_threads"])
def test_outputs_of_gpt2(name, tmp_path):
    """What is shown of it is printed: a step's checks, and a training in both modes."""
    shown = (launch.ROOT / "figures" / "outputs" / f"{name}.txt").read_text()
    for command, printed in zip(
        report.MORE["pipeline_threads"][name], re.split(r"^\$ .*\n", shown, flags=re.M)[1:],
        strict=True,
    ):  # fmt: skip
        assert f"$ OMP_NUM_THREADS=1 {command}\n" in shown
        _, script, *flags = command.split()
        file = launch.ROOT / script
        result = launch.ranks(file, *flags, nproc=1, folder=tmp_path, torchrun=False)
        assert result.code == 0, result.tail()
        same(printed, result.out)


def pipe_of(whole, split_size, by_workers):
    """A `Pipe`, whose backward is run by its workers or by autograd, as on GPUs."""
    pipe = Pipe(whole, split_size)
    pipe.backward_by_workers = by_workers
    return pipe


@pytest.mark.parametrize("by_workers", [True, False])
@pytest.mark.parametrize("batch", [1, 16, 30, 32])
@pytest.mark.parametrize("split_size", [1, 2, 4, 8, 16])
def test_pipe(batch, split_size, by_workers):
    """Output and gradients of the sequential module, also where rows are left over."""
    whole, x = stack(), torch.randn(batch, 8, dtype=torch.float64)
    assert_same(step(whole, x), step(pipe_of(whole, split_size, by_workers), x))


@pytest.mark.parametrize("by_workers", [True, False])
@pytest.mark.parametrize(("batch", "split_size"), [(0, 2), (1, 4), (3, 1)])
def test_edges_of_a_pipe(batch, split_size, by_workers):
    """No rows, fewer than a microbatch's, one in each; one partition."""
    x = torch.randn(batch, 8, dtype=torch.float64)
    for whole in stack(), stack()[:1]:
        assert_same(step(whole, x), step(pipe_of(whole, split_size, by_workers), x))


@pytest.mark.parametrize(
    ("module", "split_size", "x", "message"),
    [
        (stack, 0, torch.ones(2, 8), "split_size 0: rows of a microbatch, 1 or more"),
        (stack, 1.5, torch.ones(2, 8), "split_size 1.5: rows"),
        (nn.Sequential, 1, torch.ones(2, 8), "no modules"),
        (stack, 1, torch.tensor(1.0), "a batch is one tensor"),
        (stack, 1, (torch.ones(2, 8),), "a batch is one tensor"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), 1, torch.ones(2, 3, 4), "a tuple, is not one"),
        (lambda: nn.Sequential(nn.Flatten(0)), 1, torch.ones(2, 4), "outputs of 8 rows, from a ba"),
    ],
)
def test_pipe_refuses(module, split_size, x, message):
    with pytest.raises(ValueError, match=message):
        Pipe(module(), split_size)(x)


@pytest.mark.parametrize("backward", [False, True])
def test_interrupted_pipe(backward):
    """Ctrl-C while the caller waits: what the workers still return is not the next batch's."""
    whole, x = stack(), torch.randn(9, 8, dtype=torch.float64)
    expected, pipe = [tensor.clone() for tensor in step(whole, x)], Pipe(whole, 2)
    y = pipe(2 * x)
    threads, results = threading.active_count(), pipe.out_queues[1]
    get = results.get

    def interrupted():
        results.get = get
        raise KeyboardInterrupt

    results.get = interrupted
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward() if backward else pipe(3 * x)
    assert_same(expected, step(pipe, x))
    assert_same(expected, step(pipe, x))
    assert threading.active_count() <= threads  # the earlier workers have ended


def test_operations_in_place():
    """A partition may begin with one; autograd would not let it change what its graph begins at."""
    modules = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8)]
    whole = nn.Sequential(*map(WithDevice, modules, [CPU[0], CPU[1], CPU[1], CPU[2]])).double()
    x = torch.randn(9, 8, dtype=torch.float64)
    for by_workers in True, False:
        assert_same(step(whole, x), step(pipe_of(whole, 2, by_workers), x))


@pytest.mark.parametrize("by_workers", [True, False])
def test_deep_copy_of_a_pipe(by_workers):
    """It computes the same by threads of its own, and training it trains nothing else."""
    x, pipe = torch.randn(9, 8, dtype=torch.float64), pipe_of(stack(), 2, by_workers)
    before, other = step(pipe, x), copy.deepcopy(pipe)
    assert_same(before, step(other, x))
    queues = [{id(one) for one in each.in_queues} for each in (pipe, other)]
    assert not set.intersection(*queues) and list(map(len, queues)) == [3, 3]
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert_same(before, step(pipe, x))
    assert not torch.equal(before[0], other(x))


@pytest.mark.parametrize("by_workers", [True, False])
@pytest.mark.parametrize("devices", [(0, 1, 2), (0, 1, 0), (0, 1, 0, 1), (0,)])
def test_the_bits_of_one_after_the_other(devices, by_workers):
    """Gradients are added microbatch by microbatch, also to what is there from a step before."""
    torch.manual_seed(0)
    modules = [WithDevice(nn.Linear(8, 8), CPU[device]) for device in devices]
    whole, x, results = nn.Sequential(*modules), torch.randn(13, 8), []
    pipe = pipe_of(whole, 2, by_workers)

    def loss(y):
        return (y**2).sum()

    def by_pipe():
        loss(pipe(x)).backward()

    def by_one():
        one_after_the_other(whole, x.split(2), loss)

    def forwards():  # the control: in another order there are other bits
        for part in x.split(2):
            loss(whole(part)).backward()

    for by in by_one, by_pipe, forwards:
        whole.zero_grad()
        by(), by()
        results.append([parameter.grad for parameter in whole.parameters()])
    expected, same, others = results
    assert all(torch.equal(one, other) for one, other in zip(expected, same, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(expected, others, strict=True))


class ThreadPerTask:
    """A queue of tasks that each get a new thread: nodes of autograd made in it come first."""

    def __init__(self, out_queue):
        self.out_queue = out_queue

    def put(self, task):
        thread = threading.Thread(target=lambda: self.out_queue.put(task.run()))
        thread.start()
        thread.join()


def thread_per_task(devices):
    out_queues = [queue.Queue() for _ in devices]
    return list(map(ThreadPerTask, out_queues)), out_queues


def test_order_of_microbatches(monkeypatch):
    """The graph says it. Autograd's own order depends on which threads have made the nodes."""
    order = []

    class Noted(nn.Linear):
        def forward(self, x):
            y, microbatch = super().forward(x), int(x[0, 0])
            y.register_hook(lambda _: order.append(microbatch))
            return y

    monkeypatch.setattr(pipeline_threads, "create_workers", thread_per_task)
    pipe, x = pipe_of(nn.Sequential(Noted(1, 1)), 1, by_workers=False), torch.arange(20.0)[:, None]
    pipe(x).sum().backward()
    assert order == list(reversed(range(20)))


@pytest.mark.parametrize("by_workers", [True, False])
@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1,), (2,)])
def test_frozen(frozen, by_workers):
    """Partitions without gradients, behind integers, which have none. All frozen: no graph."""
    torch.manual_seed(0)
    layers = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    modules = [WithDevice(layer, device) for layer, device in zip(layers, CPU, strict=True)]
    whole, ids = nn.Sequential(*modules).double(), torch.randint(9, (7, 3))
    for place in frozen:
        layers[place].requires_grad_(False)
    pipe = pipe_of(whole, 2, by_workers)
    assert_same(step(whole, ids), step(pipe, ids))
    whole.requires_grad_(False)
    assert not pipe(ids).requires_grad


class ByRows(nn.Module):
    """A module that runs another one row after another."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return torch.cat([self.module(row) for row in x.split(1)])


class Cuts(nn.Module):
    def forward(self, x):
        return x.detach() if x[0, 0] > 0 else x * 1


class Ignores(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x.detach()


@pytest.mark.parametrize("by_workers", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("cut", [Cuts, Ignores])
def test_cut(cut, place, by_workers):
    """What comes before a module that gives it no gradient has none, as without a pipe."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers.insert(place, cut())
    modules = (WithDevice(layer, device) for layer, device in zip(layers, CPU, strict=True))
    whole, x = nn.Sequential(*modules).double(), torch.randn(9, 8, dtype=torch.float64)
    assert_same(step(ByRows(whole), x), step(pipe_of(whole, 1, by_workers), x))


@pytest.mark.parametrize(
    "what",
    ["one_device", "several_devices", "in_a_hook", "several_pipes", "an_exception", "twice"],
)
def test_a_device_with_a_thread(what, tmp_path):
    """No thread of autograd waits for another backward: it would wait for ever, as on a GPU."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"PyTorch {torch.__version__}: Python cannot add a device with a thread")
    file = launch.HELPERS / "device_thread.py"
    result = launch.ranks(file, what, nproc=1, folder=tmp_path, torchrun=False, timeout=60)
    assert result.code == 0 and f"{what}: ok" in result.out, result.tail()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only a model of its threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_on_gpus(gpus, dtype, tmp_path):
    """The script, with a partition on each GPU of one process."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{torch.cuda.device_count()} GPU: no partitions on two")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:gpus]
    flags = ["--dtype", dtype, "--device", "cuda", "--repeats", 1]
    result = launch.torchrun(
        "pipeline_threads", *flags, nproc=1, timeout=120,
        env={"CUDA_VISIBLE_DEVICES": ",".join(visible)},
    )  # fmt: skip
    assert result.code == 0 and "Tests passed" in result.out, result.tail()


class Fails(nn.Module):
    def forward(self, x):
        if (x > 5).any():
            raise ArithmeticError("planted")
        return FailsBack.apply(x) if (x < -5).any() else x * 1


@pytest.mark.parametrize("by_workers", [True, False])
def test_exception_in_a_thread(by_workers):
    """It reaches the caller, from the forward and the backward, and the pipe goes on after it."""
    whole = nn.Sequential(*(WithDevice(Fails(), device) for device in CPU[:2]))
    pipe, x = pipe_of(whole, 1, by_workers), torch.ones(4, 1, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="planted"):
            pipe(torch.full((4, 1), 9.0))
        assert torch.equal(pipe(x), x)
        y = pipe(x * torch.tensor([[1], [-9.0], [1], [1]]))
        with pytest.raises(ArithmeticError, match="planted"):
            y.sum().backward()
        assert all(one.empty() for one in (*pipe.in_queues, *pipe.out_queues))
        x.grad = None
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(4, 1))
        with pytest.raises(RuntimeError, match="runs once"):
            y.sum().backward()
    with torch.no_grad():
        assert not pipe(x).requires_grad


ARGS = ["--seq-len", 8, "--batch-size", 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--microbatches", 5], "--batch-size 4: fewer sequences than --microbatches 5"),
        (["--microbatches", 3, "--schedule", "torch-gpipe"], "unequal size, [2, 1, 1]"),
        (["--microbatches", 1, "--schedule", "torch-1f1b"], "1 microbatches, fewer than 2 stages"),
        (["--schedule", "interleaved", "--stages-per-rank", 9], "18 stages, but only 5 layers"),
    ],
)
def test_refused(flags, message, tmp_path):
    file = launch.TASKS / "pipeline_llama.py"
    result = launch.ranks(file, *ARGS, *flags, nproc=2, folder=tmp_path)
    result.assert_refused(message)


@pytest.mark.parametrize(
    ("flags", "nproc", "message"),
    [
        (["--model-parallel-mode", "both"], 2, "trains in one process: without torchrun"),
        (["--model-parallel-mode", "both", "--dropout"], 1, "--dropout: tiny has none"),
        (["--model", GPT2, "--seq-len", 129], 1, "has positions for 128 tokens"),
        (["--epochs", 4], 1, "--epochs needs --model-parallel-mode"),
    ],
)
def test_threads_refuse(flags, nproc, message, tmp_path):
    file = launch.TASKS / "pipeline_threads.py"
    result = launch.ranks(file, *ARGS, *flags, nproc=nproc, folder=tmp_path)
    result.assert_refused(message)


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a process's memory be limited")
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.stress)])  # README has it
def test_a_model_that_does_not_fit(nproc, tmp_path):
    """Weights, gradients and Adam's states take 0.36 GiB, and logits more: one rank has no room.

    Two have, wherever the layers' measured times divide them.
    """
    args = ["--model", "random/small", "--memory-budget", 0.4]
    file = launch.TASKS / "pipeline_llama.py"
    result = launch.ranks(file, *args, nproc=nproc, folder=tmp_path)
    if nproc == 1:
        result.assert_refused("out of memory", 60)
    else:
        assert result.code == 0 and "losses: " in result.out, result.tail()


STEPS = """
import copy, sys
sys.path.insert(0, {tasks!r})
from functools import partial
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from pipeline_llama import KEPT, Pipeline, keep_stage
from harness.model_checks import plain_loss
from loading.models import Source

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, cpu, source = dist.get_rank(), torch.device("cpu"), Source("tiny")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    batches = torch.randint(2, 1500, (2, 4, 16))
    for frozen in (), ("model.embed_tokens.weight",), ("model.embed_tokens", "model.layers.0."):
        whole = source.load_model(torch.float64, cpu)
        for schedule in "gpipe", "1f1b":
            whole.zero_grad()
            stops = (1, 5) if len(frozen) > 1 else (2, 5)
            stage = source.load_model(
                torch.float64, cpu, partial(keep_stage, stops=stops, index=rank))
            for model in whole, stage:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
            pipe = Pipeline(mesh, schedule, [stage], 2)
            for ids in batches:  # gradients of two steps add up
                mask = torch.ones_like(ids)
                pipe.step(ids, mask, ids, [2, 2])
                plain_loss(whole, ids, input_ids=ids, attention_mask=mask).backward()
                for name, parameter in stage.named_parameters():
                    grad = whole.get_parameter(name).grad
                    assert (grad is None) == (parameter.grad is None), name
                    if grad is not None:
                        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)
    for says in True, False:  # a configuration that is wrong of the weights
        whole = source.load_model(torch.float64, cpu)
        whole.config = copy.deepcopy(whole.config)
        whole.config.tie_word_embeddings = says
        if says:
            whole.lm_head.weight = torch.nn.Parameter(2 * whole.lm_head.weight.detach())
        stage, ids = copy.deepcopy(whole), batches[0]
        keep_stage(stage, stops, rank)
        mask = torch.ones_like(ids)
        Pipeline(mesh, "1f1b", [stage], 2).step(ids, mask, ids, [2, 2])
        plain_loss(whole, ids, input_ids=ids, attention_mask=mask).backward()
        for name, parameter in stage.named_parameters():
            grad = whole.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)
    stages = [
        source.load_model(torch.float64, cpu, partial(keep_stage, stops=(1, 2, 3, 5), index=i))
        for i in (rank, rank + 2)
    ]
    stages[0].requires_grad_(rank == 1)  # PyTorch's zero bubbles would lose others' gradients
    zero = Pipeline(mesh, "zero-bubble", stages, 4)
    stage.requires_grad_(rank == 1)  # one copy of the tied embedding is frozen, the other is not
    ids, mask = batches[0], torch.ones_like(batches[0])
    pipe = Pipeline(mesh, "gpipe", [stage], 2)
    pipe.step(ids, mask, ids, [2, 2])
    by_torch = Pipeline(mesh, "torch-gpipe", [stage], 2)
    for error, step, *given in (  # on both ranks, of which only one looks at ids, or at labels
        (ValueError, torch.no_grad()(pipe.step), ids, mask, ids, [2, 2]),
        (IndexError, pipe.step, ids + 1500, mask, ids, [2, 2]),
        (IndexError, pipe.step, ids, mask, ids + 1500, [2, 2]),
        (ValueError, pipe.step, ids, mask[:2], ids, [2, 2]),
        (ValueError, pipe.step, ids[:0], mask[:0], ids[:0], [0]),
        *((ValueError, pipe.step, ids, mask, ids, wrong) for wrong in ([], [4, 0], [1, 2])),
        (ValueError, by_torch.step, ids, mask, ids, [3, 1]),
        (ValueError, zero.step, ids, mask, ids, [1] * 4),
    ):
        try:
            step(*given)
        except error:
            continue
        raise AssertionError(error)
    stage.requires_grad_(True)
    for one in pipe, by_torch:  # a deep copy's stage is its own
        one.step(ids, mask, ids, [2, 2])
        other = copy.deepcopy(one)
        results = []
        for each in one, other:
            each.stages[0].zero_grad()
            loss, _ = each.step(ids, mask, ids, [2, 2])
            results.append([loss, *(p.grad for p in each.stages[0].parameters())])
        for mine, copied in zip(*results, strict=True):
            torch.testing.assert_close(mine, copied, rtol=0, atol=0)
        parameters = [{{*each.stages[0].parameters()}} for each in (one, other)]
        assert not set.intersection(*parameters) and other.group is one.group
    for trains in (False, True, False):  # PyTorch's schedules keep what they saw
        if rank == 0:
            stage.requires_grad_(trains)
        results = []
        for one in pipe, by_torch:
            stage.zero_grad()
            one.step(ids, mask, ids, [2, 2])
            results.append([p.grad for p in stage.parameters()])
        for mine, theirs in zip(*results, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    stage.requires_grad_(True)
    for length in (*range(2, 3 + KEPT), 2):  # schedules for each length; those of old ones go
        short = ids[:, :length], mask[:, :length], ids[:, :length], [2, 2]
        losses = [one.step(*short)[0] for one in (pipe, by_torch)]
        torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert len(by_torch.made) == KEPT
    dist.barrier()
    print("stepped")
"""


def test_steps_that_add_up_and_frozen_stages(tmp_path):
    """A tied embedding's copies; a first stage without a gradient, whose successor sends one.

    What a step refuses, and a deep copy of a pipeline.
    """
    (tmp_path / "steps.py").write_text(STEPS.format(tasks=str(launch.TASKS)))
    result = launch.ranks(tmp_path / "steps.py", nproc=2, folder=tmp_path)
    assert result.code == 0 and result.out.count("stepped") == 2, result.tail()
