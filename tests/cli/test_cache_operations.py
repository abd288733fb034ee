"""What is done with caches that are there, as typed; and what a disk, a folder or a file can do to them, in a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from qat_lora import files, models
from qat_lora.cache import load_cache, load_manifest
from qat_lora.cli.main import main
from scripts.convert_older_cache import main as convert_older
from tests.cache.killing import contents
from tests.conftest import VOCAB


@pytest.fixture
def said(capsys):
    """Run a command as typed; return its exit code, and the lines of its result or its one error."""

    def run(*argv: object, program=main) -> tuple[int, str]:
        capsys.readouterr()
        code = program([str(arg) for arg in argv])
        captured = capsys.readouterr()
        if code == 0:
            return code, captured.out
        name = "qat-lora" if program is main else "convert_older_cache.py"
        errors = [line for line in captured.err.splitlines() if line.startswith(f"{name}: error:")]
        assert len(errors) == 1 and "Traceback" not in captured.err
        return code, errors[0]

    return run


@pytest.fixture
def build(teacher_dir, text_file, said):
    """Build, or go on with, a cache of 3 shards."""

    def run(folder: Path, *more: object) -> tuple[int, str]:
        return said(
            "cache", "--teacher", teacher_dir, "--data", text_file, "--seq-len", 24, "--top-k", 8, "--max-rows", 40,
            "--rows-per-shard", 16, "--output", folder, "--device", "cpu", "--quiet", *more,
        )  # fmt: skip

    return run


@pytest.fixture
def qat(said, tmp_path):
    """Train one step on a cache."""

    def run(folder: Path, *more: object) -> tuple[int, str]:
        return said("qat", "--cache-dir", folder, "--output", tmp_path / "run", "--device", "cpu", "--quiet",
                    "--max-steps", 1, "--batch-size", 2, "--from-scratch", *more)  # fmt: skip

    return run


@pytest.fixture
def cache(build, tmp_path) -> Path:
    assert build(tmp_path / "c")[0] == 0
    return tmp_path / "c"


def refused(result: tuple[int, str], *words: object) -> None:
    code, text = result
    assert code == 2
    for word in words:
        assert str(word) in text, text


# ---- the acts


def test_parts_are_split_off_copied_and_merged(cache, tmp_path, said) -> None:
    code, text = said("cache", "split", cache, "--parts", 2, "--output", tmp_path / "s", "--quiet")
    assert code == 0
    assert text.splitlines() == [
        f"{tmp_path}/s/part-1-of-2: 24 of 40 rows of 24 tokens in 2 shards",
        f"{tmp_path}/s/part-2-of-2: 16 of 40 rows of 24 tokens in 1 shard",
    ]
    parts = sorted((tmp_path / "s").iterdir())
    assert said("cache", "merge", *parts, "--output", tmp_path / "m", "--quiet")[0] == 0
    assert contents(tmp_path / "m") == contents(cache)
    refused(said("cache", "merge", parts[0], "--output", tmp_path / "n"), "2 of the 3 shards", "all its parts")
    refused(said("cache", "split", cache, "--output", tmp_path / "n"), "--parts N", "--rows N")
    refused(said("cache", "split", cache, "--parts", 2, "--rows", 3), "--parts N", "--rows N")
    refused(said("cache", "split", cache, "--parts", 1), "parts=1", "--parts 2")


def test_rows_are_split_and_caches_merged(cache, tmp_path, said, qat) -> None:
    assert said("cache", "split", cache, "--rows", 10, "--output", tmp_path / "s", "--quiet")[0] == 0
    merge = ("cache", "merge", tmp_path / "s" / "first", tmp_path / "s" / "rest")
    code, text = said(*merge, "--output", tmp_path / "m", "--quiet")
    assert (code, text) == (0, f"{tmp_path}/m: 40 rows of 24 tokens in 3 shards\n")
    assert not load_manifest(tmp_path / "m").differing(load_manifest(cache))
    assert qat(tmp_path / "s" / "rest")[0] == 0


def test_a_cache_is_converted_and_trained_on(cache, tmp_path, said, qat) -> None:
    smaller = ("cache", "convert", cache, "--top-k", 4, "--rows-per-shard", 7, "--output", tmp_path / "d", "--quiet")
    assert said(*smaller)[0] == 0
    manifest = load_manifest(tmp_path / "d")
    assert (manifest.top_k, manifest.shard_count, manifest.logprob_bits) == (4, 6, 5)
    assert qat(tmp_path / "d")[0] == 0
    refused(said("cache", "convert", cache, "--top-k", 9), "8 candidates", "top_k=9")
    refused(said("cache", "convert", tmp_path / "nowhere"), "nowhere", "manifest.json")


@pytest.fixture
def older(tmp_path, teacher_dir, text_file) -> Path:
    return made_older(tmp_path / "older", teacher_dir, text_file)


def made_older(folder: Path, teacher_dir: Path, text_file: Path) -> Path:
    """A cache of the older layout, of the tiny teacher's own logits."""
    folder.mkdir()
    loaded = models.load(str(teacher_dir))
    ids = loaded.tokenizer(text_file.read_text())["input_ids"][: 12 * 25]
    ids_NL = torch.tensor(ids).reshape(12, 25)
    with torch.no_grad():
        logits_NPV = loaded.model(input_ids=ids_NL).logits[:, :-1]
    top, top_ids = logits_NPV.topk(16, dim=-1)
    drawn = torch.randint(0, logits_NPV.shape[-1], (12, 24, 64))
    shard = {
        "input_ids": ids_NL.int(), "attention_mask": torch.ones(12, 25, dtype=torch.uint8),
        "topk_idx": top_ids.int(), "topk_logits": top.half(),
        "rand_idx": drawn.int(), "rand_logits": logits_NPV.gather(-1, drawn).half(),
    }  # fmt: skip
    for index in range(3):
        torch.save({name: x[index * 4 : index * 4 + 4] for name, x in shard.items()}, folder / f"shard_{index:05d}.pt")
    (folder / "meta.json").write_text(json.dumps({"teacher_model": "some/tiny", "dataset_name": "words"}))
    return folder


def test_the_older_layout_is_converted_with_its_teachers_digests_and_trained_on(
    older, teacher_dir, other_teacher_dir, tmp_path, said, qat
) -> None:
    for act in ("convert", "info", "merge"):
        refused(said("cache", act, older), "older layout", "scripts/convert_older_cache.py", older)
    convert = (older, "--output", tmp_path / "d")
    refused(said(*convert, program=convert_older), "--teacher", "'some/tiny'", older)
    assert not (tmp_path / "d").exists()
    code, text = said(*convert, "--teacher", teacher_dir, program=convert_older)
    assert code == 0 and "log-sum-exp estimated from 64 uniform ids per position, standard error 0." in text
    assert "are estimates from uniform samples" in said("cache", "info", tmp_path / "d", "--verify")[1]
    manifest, identity = load_manifest(tmp_path / "d"), models.load(str(teacher_dir)).identity
    assert (manifest.teacher_digest, manifest.tokenizer_digest) == (identity.weights, identity.tokenizer)
    assert (manifest.vocab_size, manifest.seq_len, manifest.rows) == (identity.vocab_size, 24, 12)
    assert manifest.tokenizer_size == identity.tokenizer_size > 0
    assert qat(tmp_path / "d")[0] == 0, "the model is found and is the cache's teacher"
    refused(qat(tmp_path / "d", "--model", other_teacher_dir), "teacher_digest")
    alone = (older, "--output", tmp_path / "e", "--teacher", teacher_dir, "--tail", "none", "--temperatures", "1,2")
    assert "renormalised over 16 candidates, without a tail" in said(*alone, program=convert_older)[1]
    assert load_manifest(tmp_path / "e").temperatures == (1.0, 2.0)
    assert "(biased)" in said("cache", "info", tmp_path / "e")[1]


def test_an_identity_is_the_loaded_models(teacher_dir) -> None:
    assert models.identify(str(teacher_dir)) == models.load(str(teacher_dir)).identity
    assert models.identify("embedded") == models.load("embedded").identity


def composite(folder: Path, name: str, teacher_dir: Path) -> Path:
    """The tiny teacher with the config of a model of images and text, which has its vocabulary one level down."""
    shutil.copytree(teacher_dir, folder)
    config = getattr(transformers, name)(text_config={"vocab_size": VOCAB, "num_hidden_layers": 1})
    config.save_pretrained(folder)
    assert not hasattr(config, "vocab_size")
    return folder


@pytest.mark.parametrize("name", ["Gemma3Config", "Qwen3VLConfig", "Llama4Config"])
def test_the_identity_of_a_composite_model_has_its_texts_vocabulary(name, teacher_dir, tmp_path) -> None:
    found, plain = (
        models.identify(str(composite(tmp_path / name, name, teacher_dir))),
        models.identify(str(teacher_dir)),
    )
    assert (found.vocab_size, found.tokenizer_size) == (VOCAB, plain.tokenizer_size)


def test_the_older_layout_is_converted_with_a_composite_teacher(older, teacher_dir, tmp_path, said) -> None:
    teacher = composite(tmp_path / "teacher", "Gemma3Config", teacher_dir)
    code, text = said(older, "--output", tmp_path / "d", "--teacher", teacher, program=convert_older)
    assert code == 0, text
    assert load_manifest(tmp_path / "d").vocab_size == VOCAB
    assert "ids of the tokenizer, " in " ".join(said("cache", "info", tmp_path / "d")[1].split())


def test_a_config_without_a_vocabulary_is_said_to_be_none(older, teacher_dir, tmp_path, said) -> None:
    shutil.copytree(teacher_dir, tmp_path / "teacher")
    transformers.ViTConfig().save_pretrained(tmp_path / "teacher")
    command = (older, "--output", tmp_path / "d", "--teacher", tmp_path / "teacher")
    refused(said(*command, program=convert_older), "no config.json can be read in", "vocab_size")


# ---- what can be wrong with files, as each command says it


def test_a_missing_or_a_truncated_shard(cache, build, qat, said) -> None:
    path, before = cache / "shard-00001.safetensors", contents(cache)
    for spoil, words in (
        (lambda: path.unlink(), ("lacks its shard",)),
        (lambda: os.truncate(path, 99), ("has 99 bytes instead of",)),
    ):
        spoil()
        for command in (("info", cache, "--verify"), ("merge", cache), ("convert", cache)):
            refused(said("cache", *command), path, *words)
        refused(qat(cache), path, *words)
        assert build(cache)[0] == 0, "built anew, it alone"
        assert contents(cache) == before


def test_a_foreign_shard_and_a_stale_manifest(cache, build, qat, said, tmp_path) -> None:
    assert build(tmp_path / "other", "--temperatures", "1.0,2.0")[0] == 0
    assert build(tmp_path / "k", "--top-k", 7)[0] == 0
    own, foreign = (cache / "shard-00002.safetensors").read_bytes(), tmp_path / "other" / "shard-00002.safetensors"
    path = cache / "shard-00002.safetensors"
    shutil.copy(cache / "shard-00001.safetensors", path)
    refused(said("cache", "info", cache, "--verify"), path, "instead of")
    shutil.copy(foreign, path)
    refused(build(cache), path, "of another KD cache")
    refused(qat(cache), path)
    assert path.read_bytes() == foreign.read_bytes()
    path.write_bytes(own)
    shutil.copy(tmp_path / "other" / "manifest.json", cache / "manifest.json")
    refused(said("cache", "info", cache), "index.json' is of another cache")
    refused(qat(cache), "index.json' is of another cache")
    refused(build(cache), "temperatures: there [1.0, 2.0], asked for [1.0]")
    refused(build(cache, "--temperatures", "1.0,2.0"), "of another KD cache")


def test_a_flipped_byte_of_a_shard_and_of_a_manifest(cache, build, qat, said) -> None:
    for name in ("shard-00001.safetensors", "manifest.json"):
        data = (cache / name).read_bytes()
        (cache / name).write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        refused(said("cache", "info", cache, "--verify"), cache / name, "damaged")
        refused(qat(cache), cache / name, "damaged")
        if name == "manifest.json":
            refused(build(cache), cache / name, "damaged")
        (cache / name).write_bytes(data)
    assert said("cache", "info", cache, "--verify")[1].endswith("3 shards, every byte as recorded\n")


# ---- a full disk, a folder that cannot be written


@pytest.fixture
def mounted(tmp_path):
    """(options) -> a file system of its own in memory; skipped where we may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")

    def make(options: str) -> Path:
        done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False)
        if not done or done.returncode:
            pytest.skip("a file system cannot be mounted here")
        return folder

    yield make
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def check_a_full_disk(folder, whole, result, free, again) -> None:
    """What a build that found the disk full says and leaves, and that it goes on once there is room."""
    refused(result, "The disk of", folder, "is full: shard-00001", " bytes and 2 shards are still missing",
            "run the same command again")  # fmt: skip
    assert not list(folder.glob(".*")), "nothing half written"
    recorded = {shard.file: shard.size_bytes for shard in load_cache(folder).shards}
    assert 0 < len(recorded) < 3
    for name, size in recorded.items():
        assert (folder / name).read_bytes() == whole[name] and size == len(whole[name])
    free()
    assert again()[0] == 0
    assert contents(folder) == whole


def test_a_disk_that_is_full(mounted, build, said, cache) -> None:
    """A real one: 28 KB are left when the second shard comes."""
    whole = contents(cache)
    sizes = [len(data) for name, data in whole.items() if name.startswith("shard")]
    disk = mounted("size=1m")
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * (2**20 - sizes[0] * 3 // 2 // 4096 * 4096 - 8192))
    folder = disk / "c"
    check_a_full_disk(folder, whole, build(folder), ballast.unlink, lambda: build(folder))
    shutil.rmtree(folder)
    ballast.write_bytes(b"x" * (2**20 - sizes[0] * 3 // 2 // 4096 * 4096 - 8192))
    merge = ("cache", "merge", cache, "--output", folder, "--quiet")
    check_a_full_disk(folder, whole, said(*merge), ballast.unlink, lambda: said(*merge))


def test_a_disk_that_is_full_where_none_can_be_mounted(build, cache, tmp_path, monkeypatch) -> None:
    """The same, with a sync that says that there is no room."""
    sync, full = os.fsync, [True]

    def no_room(descriptor: int) -> None:
        if full[0] and (tmp_path / "d" / "shard-00000.safetensors").exists() and os.fstat(descriptor).st_size > 6_000:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", no_room)
    folder = tmp_path / "d"
    check_a_full_disk(
        folder, contents(cache), build(folder), full.clear, lambda: (full.append(False), build(folder))[1]
    )


def test_a_folder_that_can_only_be_read(mounted, build, said, qat, cache) -> None:
    disk = mounted("size=2m")
    shutil.copytree(cache, disk / "c")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for output in (disk / "c", disk / "other"):
        refused(build(output), output, "cannot be written (Read-only file system)", "--output")
        refused(said("cache", "merge", cache, "--output", output), output, "cannot be written (Read-only file system)")
    assert said("cache", "info", disk / "c", "--verify")[0] == 0, "reading needs no more"
    assert qat(disk / "c")[0] == 0


def test_a_folder_that_may_not_be_written(build, said, cache, tmp_path, monkeypatch) -> None:
    """The same where nothing can be mounted; who is root may write everywhere, so the probe is told no."""

    def refuse(*args, **options) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    for output in (cache, tmp_path / "other"):
        before = contents(tmp_path)
        refused(build(output), output, "cannot be written (Permission denied)", "--output")
        refused(said("cache", "convert", cache, "--output", tmp_path / "o"), "cannot be written (Permission denied)")
        assert contents(tmp_path) == before
    assert said("cache", "info", cache, "--verify")[0] == 0


def test_flags_before_an_act_are_refused(tmp_path, capsys) -> None:
    assert main(["cache", "--output", str(tmp_path / "o"), "convert", str(tmp_path)]) == 2
    assert (
        "--output stands before 'convert'; write qat-lora cache convert and then the flags" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--store", "sampled", "--top-k", "9"], "top_k=9 is of --store topk, but store='sampled'"),
        (["--samples", "9"], "samples=9 is of --store sampled, but store='topk'"),
        (["--logprob-bits", "9"], "logprob_bits=9 is unknown"),
        (["--store", "sampled", "--sampling-seed", str(2**63)], "sampling_seed must be below"),
        (["--store", "sampled", "--samples", "100000"], "samples must be at most 1024"),
    ],
)
def test_settings_of_a_store_are_checked_before_the_teacher_is_loaded(tmp_path, capsys, flags, words) -> None:
    assert main(["cache", "--teacher", "nowhere", "--output", str(tmp_path / "c"), *flags]) == 2
    assert words in capsys.readouterr().err
