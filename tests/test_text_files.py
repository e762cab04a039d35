"""What pretraining reads: files of plain text or JSON lines, tokenizers, batches by workers."""

import gc
import json
import tracemalloc
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import launch
import pretrain_2d
from harness import pretraining
from loading import bpe
from loading.batches import read_samples
from loading.documents import Rows, Tokenized, load_rows
from loading.models import Source
from loading.text import find_text
from loading.text_files import TextFile, index, read_json_lines
from utils.errors import UserError

TEXTS = [f"Story {i}: grüße, {i * i} times.\nA second line 木." for i in range(120)]


def write_json(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return path


def write_plain(path, texts=TEXTS):
    path.write_text("\n\n".join(texts))
    return path


def one_rank(**more):
    """What a `Run` of one rank has for reading, with the embedded model's size."""
    run = SimpleNamespace(rank=0, seed=0, said=[], device=torch.device("cpu"), **more)
    run.source, run.print0 = Source("tiny"), run.said.append
    run.together, run.once = (lambda function: function()), (lambda _, function: function())
    run.broadcast = lambda value: value
    return run


def same_rows(some, others):
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert all(map(torch.equal, a, b))


def test_json_lines_and_plain_text(tmp_path):
    """Of the same documents the same tokens, parts and fingerprint, however the file has them."""
    lines = write_json(tmp_path / "a.jsonl")
    plain = write_plain(tmp_path / "a.txt")
    odd = tmp_path / "odd.txt"  # a byte-order mark, CRLF, NULs, blanks, documents twice
    between = "\r\n\u3000\xa0\r\n \t\r\n"
    content = between.join(text.replace("\n", "\r\n") for text in [*TEXTS, TEXTS[3]])
    odd.write_bytes(b"\xef\xbb\xbf\r\n\r\n" + content.encode() + b"\0\r\n\r\n\0\r\n")
    by_first_line = tmp_path / "b.txt"
    by_first_line.write_text(lines.read_text().replace("\n", "\r\n\n"))
    read = [load_rows(one_rank(), str(path), None, 24, 4)[1:] for path in (lines, plain)]
    assert [len(part) for part in read[0]] == [108, 12]
    for part, other in zip(*read, strict=True):
        same_rows(part, other)
    digests = {TextFile(*index(path)).digest for path in (lines, plain, odd, by_first_line)}
    assert len(digests) == 1
    for path in lines, plain, odd, by_first_line:
        assert list(TextFile(*index(path))) == TEXTS
        assert list(TextFile(*index(path, 7))) == TEXTS[:7]
    for path in write_plain(tmp_path / "c.txt", TEXTS[1:]), write_json(lines, TEXTS[::-1]):
        assert TextFile(*index(path)).digest not in digests


def test_books(tmp_path):
    """What is between Project Gutenberg's marks alone, whatever lines end by, and behind a BOM."""
    text = (
        "About.\n\n*** START OF THE PROJECT GUTENBERG EBOOK A,\nTWO LINES ***\n\nOne.\n\nTwo.\n\n"
    )
    text += "*** END OF THE PROJECT GUTENBERG EBOOK A ***\n\nA licence.\n"
    text += "\ufeff*** START OF THE PROJECT GUTENBERG EBOOK B ***\n\nThree.\n"
    for end in "\n", "\r\n", "\r":
        path = tmp_path / "book.txt"
        path.write_bytes(text.replace("\n", end).encode())
        found = TextFile(*index(path))
        assert list(found) == ["One.", "Two.", "Three."] and found.between
        assert find_text(str(path), None, 0, 0)[1] == "One.\n\nTwo.\n\nThree."
    path.write_text("One.\n\nTwo.\n")
    assert not TextFile(*index(path)).between


def test_samples_of_json_lines(tmp_path):
    """`data_parallel.py --text`: pieces of the same text, by the tokenizer that is given."""
    paths = write_json(tmp_path / "a.jsonl"), write_plain(tmp_path / "a.txt")
    where = tmp_path / "tokenizer.json"
    bpe.write_tokenizer(bpe.train_tokenizer(TEXTS, 300), where)
    some, others, mine = (
        read_samples(one_rank(tokenizer=bpe.embedded_tokenizer()), 9, 20, str(path), tokenizer)
        for path, tokenizer in [(paths[0], None), (paths[1], None), (paths[0], where)]
    )
    assert len(some) == 9 and all(map(torch.equal, some, others))
    text = bpe.read_tokenizer(where, 300).decode(mine[0])
    assert "\n\n".join(TEXTS).startswith(text) and len(mine[0]) >= 10
    assert read_json_lines(paths[0], 100) == "\n\n".join(TEXTS[:3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": }\n', "a.jsonl: line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "a.jsonl: line 2 is no JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', 'line 2 has no "text" that is a string'),
        ("a.jsonl", b'{"text": 5}\n', 'line 1 has no "text" that is a string'),
        ("a.jsonl", b'{"text": "a"}\n{"text": " \\n"}\n', 'line 2: an empty "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: half a surrogate pair"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"\n', "a.txt: line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.txt", b"abc\n\nd\xffe", "not UTF-8: byte 0xff at offset 6"),
        ("a.txt", b"", "a.txt: no text in it"),
        ("a.jsonl", b"\n\n", "a.jsonl: no text in it"),
        ("a.txt", b" \n\n\0\n", "a.txt: no text in it"),
        ("no/such.txt", None, "such.txt: cannot be read (No such file"),
        (".", None, "cannot be read (Is a directory"),
    ],
)
def test_bad_text(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        TextFile(*index(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_bad_line_ends_the_job(tmp_path):
    """One line, of all ranks; the same for what is wrong with a tokenizer's flags."""
    path = write_json(tmp_path / "a.jsonl")
    with path.open("a") as file:
        file.write("no JSON\n")
    result = launch.ranks(pretrain_2d.__file__, "--text", path, nproc=2, folder=tmp_path)
    result.assert_refused(f"--text {path}: line {len(TEXTS) + 1} is not JSON")


def test_the_text_is_not_held_in_memory(tmp_path):
    """Of 24 MB less than a tenth, while the file is read as well as afterwards."""
    for path, write in (tmp_path / "a.jsonl", write_json), (tmp_path / "a.txt", write_plain):
        write(path, [f"{i} " + "word " * 20_000 for i in range(240)])
        gc.collect()
        tracemalloc.start()
        file = TextFile(*index(path))
        assert len(file) == 240 and file[239].startswith("239 word")
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert path.stat().st_size > 20e6 and peak < 2.4e6 and held < 1e6, (held, peak)


# ---------------------------------------------------------------- batches


class Mesh:
    """A rank's place on a mesh of dp rows, for `make_batches`."""

    def __init__(self, dp, row):
        self.dp, self.row = dp, row

    def __getitem__(self, axis):
        assert axis == "dp"
        return SimpleNamespace(size=lambda: self.dp, get_local_rank=lambda: self.row)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: no pinned memory")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_batches(device, tmp_path):
    """As many workers as one likes, and from whatever step on: the same batches, epoch by epoch."""
    path, device = str(write_json(tmp_path / "a.jsonl", TEXTS[:43])), torch.device(device)
    _, rows, _ = load_rows(one_rank(), path, None, 24, 4)
    assert len(rows) == 39  # 9 batches of 4, and 3 that no epoch takes
    rows_of_step = [[rows[i][0] for i in range(4 * (step % 9), 4 * (step % 9) + 4)]
                    for step in range(30)]  # fmt: skip
    for row in range(2):
        one = pretrain_2d.make_batches(rows, Mesh(2, row), 4, device)
        expected = list(islice(one, 30))
        for (ids, _), of_step in zip(expected, rows_of_step, strict=True):
            assert ids.device.type == device.type
            assert torch.equal(ids.cpu(), torch.stack(of_step[row::2]))
        for first, workers in (0, 2), (4, 0), (13, 0), (13, 2), (18, 1):
            again = pretrain_2d.make_batches(rows, Mesh(2, row), 4, device, first, workers)
            for batch, other in zip(expected[first:], again, strict=False):
                assert all(map(torch.equal, batch, other))
            again.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_text_that_changes(workers, tmp_path):
    """While it is used: one line. Between two runs: another fingerprint, so no resuming."""
    path, cpu = write_plain(tmp_path / "a.txt"), torch.device("cpu")
    flags = dict.fromkeys(("steps", "lr", "warm_up", "num_documents", "dtype", "seed"))
    run, args = one_rank(), SimpleNamespace(**flags, batch_size=4)
    same = [pretraining.identity_of_pretraining(run, args,
                                                load_rows(run, str(path), None, 24, 4)[1])
            for _ in range(2)]  # fmt: skip
    _, rows, _ = load_rows(run, str(path), None, 24, 4)
    path.write_text(path.read_text().replace("Story 50", "Story A50"))
    with pytest.raises(UserError) as refused:
        next(pretrain_2d.make_batches(rows, Mesh(1, 0), 4, cpu, num_workers=workers))
    assert str(refused.value) == f"--text {path}: changed while it was used"
    other = pretraining.identity_of_pretraining(
        run, args, load_rows(run, str(path), None, 24, 4)[1]
    )
    assert same[0] == same[1] and {k for k in other if other[k] != same[0][k]} == {"text"}
    bpe.write_tokenizer(bpe.train_tokenizer(TEXTS, 300), tmp_path)
    of_another = load_rows(run, str(path), None, 24, 4, tmp_path)[1]
    another = pretraining.identity_of_pretraining(run, args, of_another)
    assert {k for k in other if other[k] != another[k]} == {"tokenizer"}
    size = path.stat().st_size
    with pytest.raises(UserError, match=f"{size} bytes here, {size + 1} on rank 0"):
        TextFile(str(path), torch.zeros(1, 2), size + 1, "", json_lines=False, between=False)


# ---------------------------------------------------------------- tokenizers


def test_a_tokenizer_is_trained(tmp_path):
    """Of a text always the same one; any text comes back from it."""
    path, folder = write_json(tmp_path / "a.jsonl"), tmp_path / "new" / "folder"
    run = one_rank()
    tokenizer, rows, _ = load_rows(run, str(path), None, 24, 4, folder, 400)
    again = bpe.train_tokenizer(TEXTS, 400)
    written = (folder / bpe.NAME).read_text()
    assert again.to_str() == written and not list(folder.glob(".*"))
    assert again.get_vocab_size() == len(tokenizer) <= 400
    assert any("trained a tokenizer of" in line for line in run.said)
    assert tokenizer.convert_tokens_to_ids(list(bpe.SPECIAL)) == [0, 1, 2]
    ids, labels = rows[0]
    assert ids[0] == 0 and labels[0] == 0 and len(rows.documents[0]) > 5
    for text in "Ünknown \N{CJK UNIFIED IDEOGRAPH-4E00}\t\n  x", TEXTS[5]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported(TEXTS[5])["input_ids"] == tokenizer(TEXTS[5])["input_ids"]
    assert exported.pad_token == bpe.PAD
    # Once: of another text it is not trained again; a folder and its file are the same.
    other = str(write_plain(tmp_path / "b.txt", [text.upper() for text in TEXTS]))
    run = one_rank()
    load_rows(run, other, None, 24, 4, folder / bpe.NAME, 300)
    assert (folder / bpe.NAME).read_text() == written
    assert any("not trained again" in line for line in run.said)


def no_special(folder):
    bpe.write_tokenizer(bpe.train_tokenizer(TEXTS, 300), folder)
    path = folder / bpe.NAME
    path.write_text(path.read_text().replace("[EOT]", "[END]"))


BAD = {
    # a message: what makes the folder, --train-tokenizer
    "no tokenizer there": (lambda folder: None, None),
    "tokenizer.json: not read": (lambda folder: (folder / bpe.NAME).write_text("{}"), None),
    "tokenizer.json: without [EOT]": (no_special, None),
    "300 tokens, the model has only 280": (
        lambda folder: bpe.write_tokenizer(bpe.train_tokenizer(TEXTS, 300), folder), None,
    ),
    "--train-tokenizer 281: take 259": (lambda folder: None, 281),
    "--train-tokenizer 258: take 259": (lambda folder: None, 258),
    "cannot be written": (lambda folder: (folder.rmdir(), folder.write_text("a file")), 270),
    "needs --tokenizer": (lambda folder: folder.rmdir(), 270),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_tokenizers(message, tmp_path):
    make, size = BAD[message]
    path, folder, run = str(write_plain(tmp_path / "a.txt")), tmp_path / "folder", one_rank()
    folder.mkdir()
    make(folder)
    run.source.config.vocab_size = 280
    with pytest.raises(UserError) as refused:
        load_rows(run, path, None, 24, 4, folder if folder.exists() else None, size)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_articles_model():
    """`random/179m` has the shapes of the article on tensor parallelism and FSDP2."""
    shapes = Source("random/179m").shapes
    layer = "model.layers.11."
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (50_000, 768)
    assert shapes[f"{layer}self_attn.q_proj.weight"] == (12 * 64, 768)
    assert shapes[f"{layer}self_attn.k_proj.weight"] == (3 * 64, 768)
    assert shapes[f"{layer}mlp.up_proj.weight"] == (3072, 768)
    assert "model.layers.12.input_layernorm.weight" not in shapes
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 179_448_576


def test_epochs():
    """So many times all whole batches of what is trained on."""
    run, args = one_rank(), SimpleNamespace(epochs=3, steps=12, batch_size=4)
    assert pretraining.number_of_steps(run, args, range(43)) == 30
    assert run.said == ["3 epochs of 10 steps"]
    args.epochs = None
    assert pretraining.number_of_steps(run, args, range(43)) == 12


def test_rows_are_made_when_asked_for():
    """Of the document that is asked for, and of no other."""
    asked = []

    class Documents(list):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    places, tokenizer = torch.tensor([5, 2]), bpe.embedded_tokenizer()
    rows = Rows(Tokenized(Documents(TEXTS), places, tokenizer), 24, tokenizer)
    assert len(rows) == 2 and TEXTS[2].startswith(tokenizer.decode(rows[1][0][1:-1])[:10])
    assert asked == [2]
