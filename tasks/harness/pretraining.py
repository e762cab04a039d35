"""Around pretraining: checks against a single rank, progress, a bigram's loss, and the export."""

import hashlib
import logging
import math
import shutil
import time
from itertools import islice

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.linalg import vector_norm
from tqdm import tqdm
from transformers import LlamaForCausalLM

from checkpoints.checkpoint import fingerprint_of_config, swap
from harness.flags import sides_of
from harness.float64 import compute_in_float64
from harness.measure import peak_memory_of_process
from harness.model_checks import error_of_mean, number_of_parameters, plain_loss
from harness.step_checks import check_copies, compare_gradients, refuse_not_finite
from harness.wider import WIDER, wider_copy
from loading.documents import bigram_loss
from utils.errors import UserError
from utils.losses import mean_loss, token_losses

STEPS, STEPS_OF_LARGE = 10, 2  # steps that are compared, at most; fewer of a large model
LARGE = 150e6  # parameters; beyond, ten steps of the reference take longer than all else
PART = ".result-model.part"  # the exported model's folder, while it is written


def make_mesh(run, dp=None, tp=None, batch_size=None):
    """Return the mesh of the axes "dp" and "tp"; a size that is None is chosen here.

    Raises UserError where their product is not the number of ranks, or dp does not divide a batch.
    """
    # No warning that clipping's norm takes two all-reduces: they are of one number each.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    P, shared = run.world_size, run.device.type == "cuda" and dist.get_backend() == "gloo"
    if shared and (tp or 1) > 1:  # pytorch issue 152645
        raise UserError(
            f"--share-gpus: gloo does not gather DTensors on a GPU: --tp {tp} must be 1"
        )
    dp, tp = sides_of(P, "dp", "tp", dp, 1 if shared else tp)
    if batch_size and batch_size % dp:
        raise UserError(f"--batch-size {batch_size}: not a multiple of --dp {dp}")
    run.print0(f"mesh: dp={dp} x tp={tp}")
    run.print_in_order(
        f"Starting worker {run.rank}/{P}: dp {run.rank // tp}, tp {run.rank % tp}, on {run.device}"
    )
    return run.mesh_2d("dp", "tp", tp)


class ReferenceTraining:
    """What the unmodified model makes of the first steps, on rank 0 alone.

    `references`: the model as it is before those steps, see `checks.Comparison.references`.
    Batches, learning rates and clipping are written anew here, so as to check the script's own;
    AdamW is PyTorch's in both. args: the flags.
    """

    def __init__(self, run, rows, args):
        large = number_of_parameters(run.source) > LARGE
        self.rows, self.args = rows, args
        self.steps = min(args.steps, STEPS_OF_LARGE if large else STEPS)
        self.references = run.references(run.load_reference())
        if args.warm_up >= args.steps:
            run.print0(f"note: --warm-up {args.warm_up} covers all of --steps {args.steps}")
        if run.dtype == torch.bfloat16:  # it loses small changes
            self.steps = 0
            run.print0("note: in bfloat16 only the first step's loss and gradients are compared")
        elif large:
            run.print0(f"note: a large model: {self.steps} steps are compared")

    def batch(self, run, step, rows=None):
        """Return a step's ids and labels, (B, S), of all ranks. rows: default those of training."""
        B, rows = self.args.batch_size, self.rows if rows is None else rows
        first = step % (len(rows) // B) * B
        pairs = [rows[i] for i in range(first, first + B)]
        return [torch.stack(tensors).to(run.device) for tensors in zip(*pairs, strict=True)]

    def check_first_step(self, run, model, step):
        """Compare the first step's loss and all gradients, before the parameters change.

        step(): fills in the gradients, and returns the loss, the same on all ranks.
        """
        ids, labels = self.batch(run, 0)

        def losses_of(one):
            one.zero_grad()
            losses = token_losses(one(ids, use_cache=False).logits, labels)
            mean_loss(losses, labels).backward()
            return [losses.detach()]

        (losses,) = run.reference_values(losses_of, self.references)
        self.least_error, expected = (
            error_of_mean(*losses),
            [mean_loss(one, labels) for one in losses],
        )
        loss = step().to(expected[0].dtype)
        run.show("loss", expected[0], loss)
        run.check("loss of the first step", [(loss, *expected)], least_error=self.least_error)
        run.check_same_bits("loss of the first step, same bits on all ranks", loss)
        compare_gradients(run, "gradients of the first step", model, self.references)
        model.zero_grad()

    def check_held_out(self, run, evaluate, held):
        """Compare the mean loss of the first two batches held out, before the training.

        evaluate(count): the ranks' own mean over so many batches. held: the rows; one batch of them
        is taken where there are no two.
        """
        count = min(2, len(held) // self.args.batch_size)
        batches = [self.batch(run, number, held) for number in range(count)]
        name = "held-out loss before training"
        check_mean_loss(run, name, evaluate(count), self.references, batches)

    def rate(self, step):
        """Return a step's learning rate: up from a tenth, then down as a cosine."""
        steps, warm_up = self.args.steps, self.args.warm_up
        after = max(0, step - warm_up) / max(1, steps - warm_up)
        ramp = 0.1 + 0.9 * step / warm_up if step < warm_up else 1
        return self.args.lr * ramp * math.cos(math.pi / 2 * after) ** 2

    def train_alone(self, run, model, first, stop, state):
        """Train for these steps. Return losses, global gradient norms and rates, as float64.

        state: what the model and AdamW begin with, from `ShardedCheckpoints.full_state`; {}: they
        begin as they are.
        """
        parameters = list(model.parameters())
        settings = dict(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        optimizer, losses = torch.optim.AdamW(parameters, self.args.lr, **settings), []
        norms, rates = [], []
        for name, parameter in model.named_parameters() if state else ():
            entries = {key: x.to(parameter, copy=True) for key, x in state[name].items()}
            with torch.no_grad():
                parameter.copy_(entries.pop("parameter"))
            optimizer.state[parameter] = entries | {"step": torch.tensor(float(first))}
        for step in range(first, stop):
            ids, labels = self.batch(run, step)
            optimizer.zero_grad()
            loss = plain_loss(model, labels, input_ids=ids, use_cache=False)
            loss.backward()
            # By clip_grad_norm_'s own kernel: in float32 its rounding changes the norm by more
            # than the gradients' errors do, so the reference must round alike.
            norm = vector_norm(torch.stack([vector_norm(p.grad) for p in parameters]))
            for parameter in parameters:
                parameter.grad *= min(1, 1 / (norm.item() + 1e-6))
            optimizer.param_groups[0]["lr"] = self.rate(step)
            optimizer.step()
            losses.append(loss.item())
            norms.append(norm.item())
            rates.append(optimizer.param_groups[0]["lr"])
        return [torch.tensor(values, dtype=torch.float64) for values in (losses, norms, rates)]

    def check_steps(self, run, model, training, losses, checkpoints):
        """Compare loss, norm and learning rate of the first steps, and the parameters after them.

        Parameters are compared only in float64: where a gradient is nearly 0, rounding alone says
        where Adam's full step goes. training: see `saving`. losses: those
        that a checkpoint holds, if the run resumes. They are compared, too, and the reference takes
        the next steps from that checkpoint's full state.
        """
        before = len(losses)
        if not self.steps:
            self.references.clear()
            return
        if before:
            recorded = [losses[: self.steps]]
            self.compare(run, recorded, 0, "", {})
        state = run.together(lambda: checkpoints.full_state() if before and run.rank == 0 else {})
        steps = list(islice(training, min(self.steps, self.args.steps - before)))
        for i, (loss, norm, rate) in enumerate(steps, before):
            run.print0(
                f"Update={i}, Loss={loss:.4f}, norm of the gradients {norm:.3f}, "
                f"learning rate {rate:.2e}"
            )
        if steps:
            where = f" from step {before} on" if before else ""
            self.compare(run, zip(*steps, strict=True), before, where, state)
            if run.dtype == torch.float64:
                categories = run.slices(
                    model, self.references, lambda name: True, lambda p: p.detach()
                )
                name = f"parameters after {len(steps)} steps{where}"
                for category, pairs in categories.items():
                    run.compare(name, pairs, tolerance=1e-10, category=category)
                run.check(name)
        self.references.clear()  # rank 0 has held three models so far

    def compare(self, run, found, first, where, state):
        """Compare losses, or also norms and rates, of steps from `first` on with `train_alone`."""
        found = torch.tensor(list(found), dtype=torch.float64, device=run.device)
        count, models = found.shape[1], self.references[:1]
        models += [wider_copy(one) for one in models if run.dtype in WIDER]

        def curves(one):
            return self.train_alone(run, one, first, first + count, state)

        expected = run.reference_values(curves, models)
        names = "losses", "norms of the gradients", "learning rates"
        for name, of_one, (reference, *exact) in zip(names, found, expected, strict=False):
            pair = [(of_one.to(reference.dtype), reference, *exact)]
            if name == "learning rates":
                run.check(f"{name}{where}", [pair[0][:2]], tolerance=1e-12 * self.args.lr)
            else:
                run.check(f"{name} of {count} steps{where}", pair, least_error=self.least_error)


def check_fully_split(run, model, replicated):
    """Check that every parameter is split over dp, too, and each layer is a unit of FSDP2's.

    Unless `replicated`: then nothing is checked.
    """
    if replicated:
        return
    rest = [layer for layer in model.model.layers if not isinstance(layer, FSDPModule)]
    for parameter in model.parameters():
        axes, placements = parameter.device_mesh.mesh_dim_names, parameter.placements
        if "dp" not in axes or placements[axes.index("dp")].is_replicate():
            rest.append(parameter)
    count = torch.tensor(float(len(rest)))
    run.check("weights, all split over dp", [(count, 0 * count)], tolerance=0.0)


def number_of_steps(run, args, rows):
    """Return --steps or, given --epochs, the number of whole batches in so many epochs."""
    if args.epochs is None:
        return args.steps
    batches = len(rows) // args.batch_size
    run.print0(f"{args.epochs} epochs of {batches} steps")
    return args.epochs * batches


def identity_of_pretraining(run, args, rows):
    """Return what must be the same for a checkpoint to be continued, {name: value}."""
    names = "steps", "lr", "warm_up", "batch_size", "num_documents", "dtype", "seed"
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    tokenizer = rows.documents.tokenizer.backend_tokenizer.to_str()
    return flags | {
        "--seq-len": rows.length,
        "text": rows.documents.documents.digest,
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "config": fingerprint_of_config(run.source.config),
    }


def saving(training, losses, args, save):
    """Yield the steps of `training`, (loss, norm, rate) each; keep losses, and write checkpoints.

    save(losses): writes a checkpoint; called every so many steps, and at the end. Raises UserError
    for a loss or a norm that is infinite or NaN, before that step is saved.
    """
    for loss, norm, rate in training:
        refuse_not_finite(torch.tensor([loss, norm], dtype=torch.float64), args.lr)
        losses.append(loss)
        if len(losses) % args.save_every == 0 and len(losses) < args.steps:
            save(losses)
        yield loss, norm, rate
    save(losses)


def progress(run, trial, model, training, losses, tokens):
    """Train on to the last step, with a bar in a terminal.

    tokens: how many a step has, on all ranks together.
    """
    done, steps, rates = len(losses), trial.args.steps, []
    bar = tqdm(
        total=steps,
        initial=done,
        desc="train",
        unit="step",
        mininterval=2.0,
        disable=None if run.rank == 0 else True,
    )

    def go_on():
        for loss, norm, rate in training:
            rates.append(rate)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", norm=f"{norm:.2f}", refresh=False)
            if len(losses) % max(1, steps // 10) == 0:
                run.print0(f"Update={len(losses) - 1}, Loss={loss:.4f}")

    begin = time.perf_counter()
    peak = peak_memory_of_process(run.device, go_on)
    bar.close()
    check_copies(run, "copies of a parameter, trained", model)
    run.results["losses"] = losses
    if done >= steps:
        return
    speed = (steps - done) * tokens / (time.perf_counter() - begin)
    peaks = run.gather_objects(peak)
    run.results |= {"tokens_per_second": speed, "peak_memory_bytes": peaks}
    pair = [torch.tensor(values) for values in (rates, list(map(trial.rate, range(done, steps))))]
    run.check("learning rates of the others", [pair], tolerance=1e-12 * trial.args.lr)
    run.print0(f"tokens_per_second={speed:.0f}, padding counted, max_mem={max(peaks) / 1e9:.2f}gb")


def check_long_loss(run, loss, ids):
    """Compare the first loss of a training on ids (B, S) with the unmodified model's forward."""
    # One sequence at a time: the logits of all would take most of the memory.
    rows = [(row, row) for row in ids.split(1)]
    references = run.references(run.load_reference())
    check_mean_loss(run, "loss of the first long step", loss, references, rows)


def check_mean_loss(run, name, loss, references, batches):
    """Compare a mean loss over batches, (ids, labels) each, with the references' on rank 0."""
    labels = torch.cat([labels for _, labels in batches])

    def losses_of(one):
        pairs = ((one(ids, use_cache=False).logits, labels) for ids, labels in batches)
        return [torch.cat([token_losses(*pair) for pair in pairs])]

    with torch.no_grad():
        (losses,) = run.reference_values(losses_of, references)
    expected = [mean_loss(one, labels) for one in losses]
    loss = torch.tensor(loss, dtype=torch.float64).to(expected[0])
    run.check(name, [(loss, *expected)], least_error=error_of_mean(*losses))


def say_what_was_learnt(run, loss, rows, held):
    """Print the held-out loss beside a bigram model's."""
    bigram = bigram_loss(rows, held, run.source.config.vocab_size) if run.rank == 0 else None
    run.print0(
        f"loss of {len(held)} documents held out: {loss:.4f}; of a bigram model of the "
        f"others: {bigram or 0:.4f}"
    )
    run.results |= {"held_out_loss": loss, "bigram_loss": bigram}


# ---------------------------------------------------------------- export


def export(run, model, tokenizer, checkpoints, batches, loss):
    """Write a model that plain transformers loads, whole or not at all; check it by loading it.

    checkpoints: its `result` is the folder. batches: (ids, labels) each, of all ranks. loss: the
    ranks' own mean loss of them. Rank 0 continues the first row with the written model.
    """
    transformers.utils.logging.disable_progress_bar()
    full_state, folder = {}, checkpoints.result
    for name, parameter in model.named_parameters():
        full = parameter.detach().full_tensor()
        if run.rank == 0:
            full_state[name] = full.cpu()

    def write():
        if run.rank:
            return
        try:
            write_model()
        except Exception as error:  # safetensors has an error of its own for a full disk
            shutil.rmtree(folder.with_name(PART), ignore_errors=True)
            raise OSError(f"{folder}: not written ({error})") from error

    def write_model():
        checkpoints.claim.check()
        part = folder.with_name(PART)
        shutil.rmtree(part, ignore_errors=True)
        one = run.source.empty_model()
        one.load_state_dict(full_state, strict=False, assign=True)
        one.tie_weights()
        one.save_pretrained(part)
        tokenizer.save_pretrained(part)
        swap(part, folder)

    run.together(write)
    batches = [[tensor.to(run.device) for tensor in batch] for batch in batches]
    again = LlamaForCausalLM.from_pretrained(folder).to(run.device) if full_state else None
    if full_state and again.dtype != run.dtype:  # transformers 4 has read it as float32
        again.to(run.dtype)
        for path in folder.glob("*.safetensors"):
            again.load_state_dict(load_file(path), strict=False)
    if full_state and run.dtype == torch.float64:
        compute_in_float64(again)
    references = run.references(again)
    check_mean_loss(run, "held-out loss of what was exported", loss, references, batches)
    if full_state:
        text = again.generate(batches[0][0][:1, :8], max_new_tokens=24, do_sample=False)[0]
        run.print0(f"exported to {folder}, which continues: {tokenizer.decode(text)}")
