"""The launch scripts: several machines, for real where this one can play them."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import launch
from runs import QUICK

LAUNCH = launch.ROOT / "launch"
FILES = sorted(path for path in LAUNCH.iterdir() if path.suffix != ".py")
SMALL = ["tasks/tp_mlp.py", "--model", "random/small", "--hidden-size", 64]
SMALL += ["--intermediate-size", 128, "--device", "cpu"]
TRAIN = ["tasks/ulysses_finetune.py", "--check-steps", "0", "--seq-len", "64", "--save-every", "5"]
TRAIN += ["--device", "cpu"]
FAST = {"TORCHRUN": str(Path(sys.executable).parent / "torchrun"), "NPROC": "1"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_syntax(file):
    """Bash reads them, and shellcheck finds nothing, where there is one."""
    assert launch.run(["bash", "-n", file]).code == 0
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here: bash -n alone was run")
    result = launch.run(["shellcheck", "-x", file])
    assert result.code == 0, result.tail()


@pytest.mark.parametrize("name", ["single_node.sh", "multi_node.sh", "slurm.sbatch"])
def test_dry_run(name):
    """The final command, quoted as a shell needs it, and nothing is run."""
    env = FAST | {"HEAD": "127.0.0.1", "NPROC": "3"}
    words = ["bash", LAUNCH / name, "--dry-run", "tasks/tp_llama.py", "--prompt", "it's a b"]
    result = launch.run(words, env=env)
    assert result.code == 0 and result.out.count("\n") == 1, result.tail()
    assert "--nproc_per_node 3" in result.out and r"it\'s\ a\ b" in result.out, result.tail()
    for setting in ("OMP_NUM_THREADS=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100"):  # fmt: skip
        assert setting in result.out
    result = launch.run(words, env=env | {"IFACE": "eth1"})
    # NCCL takes a name for the beginning of one; "=" is for no other than that.
    assert ("NCCL_SOCKET_IFNAME==eth1 " in result.out) == (name != "single_node.sh"), result.tail()


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [("", 2), ("3", 1), ("0,2,5", 3), ("-1", 2), ("NoDevFiles", 2), ("1,-1,2", 1)],
)
def test_ranks_by_visible_gpus(visible, ranks):
    """Not by those of the machine, of which some are another's; and on these, not on the CPU."""
    words = ["bash", LAUNCH / "single_node.sh", "--dry-run", "tasks/tp_llama.py", "--seed", "1"]
    result = launch.run(words, env=FAST | {"NPROC": "", "CUDA_VISIBLE_DEVICES": visible})
    assert f"--nproc_per_node {ranks} " in result.out, result.tail()
    on_gpus = visible[:1].isdigit()
    assert ("tp_llama.py --device cuda --seed 1" in result.out) == on_gpus, result.tail()
    result = launch.run(words, env=FAST | {"NPROC": "2", "CUDA_VISIBLE_DEVICES": visible})
    assert "tp_llama.py --seed 1" in result.out, result.tail()
    env = FAST | {"NPROC": "", "CUDA_VISIBLE_DEVICES": visible}
    for cpu in (["--device", "cpu"], ["--device=cpu"]):  # no rank on the CPU for each GPU
        result = launch.run([*words, *cpu], env=env)
        assert "--nproc_per_node 2 " in result.out and "cuda" not in result.out, result.tail()


@pytest.mark.parametrize("name", ["single_node.sh", "multi_node.sh", "slurm.sbatch"])
def test_help(name):
    """The comment at its head."""
    result = launch.run(["bash", LAUNCH / name, "--help"])
    assert result.code == 0 and not result.err, result.tail()
    assert f"launch/{name}" in result.out and "set -euo" not in result.out, result.tail()


WRONG = {
    "no task": ("single_node.sh", ["tasks/no.py"], {}, "no such task here: 'tasks/no.py'"),
    "no number": ("single_node.sh", ["tasks/tp_mlp.py"], {"NPROC": "two"}, "NPROC=two"),
    "no head": ("multi_node.sh", ["tasks/tp_mlp.py"], {}, "HEAD is not set"),
    "no such head": ("multi_node.sh", ["tasks/tp_mlp.py"], {"HEAD": "no.such.invalid"}, "HEAD="),
    "no Slurm": ("slurm.sbatch", ["tasks/tp_mlp.py"], {}, "start it with sbatch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    file, args, env, message = WRONG[name]
    result = launch.run(["bash", LAUNCH / file, *args], env=FAST | env)
    result.assert_refused(message)


def test_port_in_use():
    """torchrun would end in a traceback; who listens there is not disturbed."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        env = FAST | {"HEAD": "127.0.0.1", "NNODES": "1", "PORT": port}
        launch.run(["bash", LAUNCH / "multi_node.sh", *SMALL], env=env).assert_refused(
            f"PORT={port} is in use here"
        )


def test_single_node():
    result = launch.run(["bash", LAUNCH / "single_node.sh", *SMALL], env=FAST | {"NPROC": "2"})
    assert result.code == 0 and "Tests passed (rank=1)" in result.out, result.tail()


# ---------------------------------------------------------------- two machines, as namespaces


@pytest.fixture
def two_nodes():
    """Names of two network namespaces with a cable between them, and the first's address."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the ip command: two machines not tested")
    names = [f"node{i}-{os.getpid()}" for i in range(2)]
    first, second = (f"veth{i}-{os.getpid() % 10**6}" for i in range(2))
    net = f"10.{os.getpid() % 200 + 20}.7"

    def ip(*words):
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", first, "netns", names[0], "type", "veth",
               "peer", "name", second, "netns", names[1])  # fmt: skip
        except RuntimeError as error:
            pytest.skip(f"network namespaces cannot be made here ({error}): not tested")
        for i, (name, device) in enumerate(zip(names, (first, second), strict=True)):
            ip("-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, f"{net}.1", lambda: ip("-n", names[1], "link", "set", second, "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_nodes(nodes, head, job, folder, args, nproc=1):
    """The same command on both; their processes and the files that they print into."""
    env = launch.environment(job, FAST | {"HEAD": head, "NPROC": str(nproc)})
    jobs = []
    for node in nodes:
        words = ["ip", "netns", "exec", node, "bash", LAUNCH / "multi_node.sh", *args]
        out, err = folder / f"{node}.out", folder / f"{node}.err"
        with out.open("w") as a, err.open("w") as b:
            jobs.append(
                (subprocess.Popen(list(map(str, words)), env=env, cwd=launch.ROOT, stdout=a,
                                  stderr=b), out, err)
            )  # fmt: skip
    return jobs


# Over the cable and beside it: what is split along two axes, the ring, and what trains longest.
BOTH = "tp_llama", "ulysses_finetune", "ring_attention", "tp_ulysses", "pretrain_2d"


@pytest.mark.parametrize(
    "way", ["by torchrun", pytest.param("by single_node.sh", marks=pytest.mark.stress)]
)
def test_a_host_whose_name_does_not_resolve(way):
    """As in many containers. By torchrun after what the README says to run once before."""
    apart = ["unshare", "--map-root-user", "--uts", "bash", "-c"]
    if launch.run([*apart, "true"]).code:
        pytest.skip("no namespaces of host names here (unshare)")
    (once,) = re.findall(r"`(export PET_LOCAL_ADDR=\S+)`", (launch.ROOT / "README.md").read_text())
    task = " ".join(map(str, SMALL))
    commands = {
        "by torchrun": f"{once}; {FAST['TORCHRUN']} --standalone --nproc_per_node 2 {task}",
        "by single_node.sh": f"launch/single_node.sh {task}",
    }
    command = f"hostname no-such-host-xyz; {commands[way]}"
    env = FAST | {"NPROC": "2", "PET_LOCAL_ADDR": ""}
    result = launch.run([*apart, f"unset PET_LOCAL_ADDR; {command}"], cwd=launch.ROOT, env=env)
    assert result.code == 0 and "Tests passed (rank=1)" in result.out, result.tail()


@pytest.mark.parametrize(
    ("script", "nproc"),
    [pytest.param(s, 1 + (s in BOTH), marks=pytest.mark.stress) for s in launch.SCRIPTS],
)
def test_two_machines(script, nproc, two_nodes, tmp_path):
    """Tensor and sequence parallelism over a cable: the same checks, on the same tolerances."""
    nodes, head, _ = two_nodes
    job = uuid.uuid4().hex
    args = [f"tasks/{script}.py", "--device", "cpu", *map(str, QUICK.get(script, []))]
    jobs = on_nodes(nodes, head, job, tmp_path, args, nproc)
    assert not launch.survivors(job, 120)
    codes = [process.wait() for process, _, _ in jobs]
    said = [out.read_text() for _, out, _ in jobs]
    assert codes == [0, 0], "\n".join(said) + "".join(err.read_text() for *_, err in jobs)
    assert sum(text.count("Tests passed") for text in said) == 2 * nproc
    assert all("Tests passed" in text for text in said)


@pytest.mark.stress
@pytest.mark.parametrize("nproc", [1, 2])
def test_cable_cut(nproc, two_nodes, tmp_path):
    """A machine that is cut off mid-run: both ends say so in a line, and stop within 30 s."""
    nodes, head, cut = two_nodes
    job = uuid.uuid4().hex
    jobs = on_nodes(nodes, head, job, tmp_path, [*TRAIN, "--steps", "1000000"], nproc)
    wait_for(r"^i=3\t", jobs[0][1])
    cut()
    assert not launch.survivors(job, 30), "still there after 30 s"
    for process, _, err in jobs:
        lines = re.findall("^error: .*", err.read_text(), re.M)
        assert process.wait() != 0 and len(lines) == 1 and "no sign of life" in lines[0], lines


@pytest.mark.stress
def test_machine_gone(two_nodes, tmp_path):
    """All of its processes end at once, so that its connections close: the other names its rank."""
    nodes, head, _ = two_nodes
    job = uuid.uuid4().hex
    jobs = on_nodes(nodes, head, job, tmp_path, [*TRAIN, "--steps", "1000000"])
    wait_for(r"^i=3\t", jobs[0][1])
    agent = launch.psutil.Process(jobs[1][0].pid)
    for process in [*agent.children(recursive=True), agent]:
        process.kill()
    assert not launch.survivors(job, 30), "still there after 30 s"
    lines = re.findall("^error: .*", jobs[0][2].read_text(), re.M)
    assert len(lines) == 1 and "rank 1 ended, and did not come" in lines[0], lines


# ---------------------------------------------------------------- Slurm


CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
KillWait=20
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# Runs a step as srun does: the command once for each node, all of them on this machine.
STUB = """#!/usr/bin/env bash
set -eu
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 "$@" &
    started+=($!)
done
for process in "${started[@]}"; do wait "$process"; done
"""


def test_slurm_stub(tmp_path):
    """Without Slurm: its variables, and a stand-in for srun."""
    (tmp_path / "srun").write_text(STUB)
    (tmp_path / "srun").chmod(0o755)
    env = FAST | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": "2"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(launch.ROOT)}
    result = launch.run(["bash", LAUNCH / "slurm.sbatch", *SMALL], env=env)
    assert result.code == 0 and not result.survivors, result.tail()
    assert result.out.count("Tests passed") == 2, result.tail()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A real cluster of two nodes, both on this machine: its environment."""
    programs = "munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue"
    missing = [name for name in programs if not shutil.which(name)]
    if missing or os.geteuid():
        why = f"no {', '.join(missing)}" if missing else "not root"
        pytest.skip(f"{why}: only the stand-in for srun was run "
                    "(apt-get install slurmctld slurmd slurm-client munge)")  # fmt: skip
    folder, port = tmp_path_factory.mktemp("slurm"), 21000 + os.getpid() % 1000 * 3
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=os.uname().nodename, port=port,
                                port1=port + 1, port2=port + 2))  # fmt: skip
    job = uuid.uuid4().hex
    env = launch.environment(job, FAST | {"SLURM_CONF": str(conf)})

    def start(*words):
        subprocess.run(list(map(str, words)), env=env, check=True, capture_output=True)

    files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid",
             "log-file": "munged.log", "seed-file": "seed"}  # fmt: skip
    try:
        start("munged", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
        start("slurmctld", "-f", conf)
        for node in ("n1", "n2"):
            start("slurmd", "-N", node, "-f", conf)
        deadline = time.monotonic() + 30
        while "idle" not in said(env, "sinfo", "-h", "-o", "%T %D"):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        yield env
    finally:
        for process in launch.processes(job):
            process.kill()


def said(env, *words):
    words = list(map(str, words))
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout


def submit(env, job, log, args):
    """Its number, once it is in Slurm's queue."""
    env = env | {launch.MARK: job}
    words = ["sbatch", "--parsable", "--output", log, LAUNCH / "slurm.sbatch", *args]
    return said(env, *words).strip()


def wait_for(text, log, seconds=90):
    deadline = time.monotonic() + seconds
    while not (log.exists() and re.search(text, log.read_text(), re.M)):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.3)


def test_slurm(slurm, tmp_path):
    """Both nodes; then one that is cancelled while it trains, of which nothing is left."""
    log, job = tmp_path / "log", uuid.uuid4().hex
    submit(slurm, job, log, SMALL)
    wait_for(r"Tests passed \(rank=0\)[\s\S]*Tests passed \(rank=1\)", log)
    assert not launch.survivors(job, 20)

    log, job = tmp_path / "cancelled", uuid.uuid4().hex
    number = submit(slurm, job, log, [*TRAIN, "--steps", "1000000"])
    wait_for(r"^i=3\t", log)
    said(slurm, "scancel", number)
    assert not launch.survivors(job, 30), log.read_text()


@pytest.mark.stress
def test_slurm_requeue(slurm, tmp_path):
    """Put back into the queue while it trains, it goes on, to the bits of an undisturbed run."""
    args = [*TRAIN, "--steps", "40", "--output-dir"]
    whole = launch.torchrun("ulysses_finetune", *args[1:], tmp_path / "whole", nproc=2)
    assert whole.code == 0, whole.tail()
    log, job = tmp_path / "log", uuid.uuid4().hex
    number = submit(slurm, job, log, [*args, tmp_path / "run", "--resume"])
    wait_for(r"^i=12\t", log)
    said(slurm, "scontrol", "requeue", number)
    # (Slurm begins a requeued job no sooner than two minutes later, unless told.)
    wait_for("interrupted after", log)
    time.sleep(2)
    said(slurm, "scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_for(r"Tests passed \(rank=0\)[\s\S]*Tests passed \(rank=1\)", log, 200)
    assert not launch.survivors(job, 20)
    losses = dict(re.findall(r"^i=(\d+)\t(loss.*)$", log.read_text(), re.M))
    assert losses == dict(re.findall(r"^i=(\d+)\t(loss.*)$", whole.out, re.M))
    assert len(re.findall(r"^i=", log.read_text(), re.M)) == 40  # none twice
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
