"""URLs beside paths: what is one, what is written whole, and that every failure is one sentence."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from qat_lora import urls
from qat_lora.cli.flags import run_from
from qat_lora.cli.main import RUNS, _parser, main
from qat_lora.config import QatRun, RecoveryRun
from qat_lora.config.cache import CacheRun
from qat_lora.errors import ConfigError, QatLoraError, RemoteError
from qat_lora.settings import from_json, to_json
from qat_lora.urls import Url, check_writable, file_sizes, is_remote, location, read_at_most
from tests.elsewhere import Elsewhere


@pytest.fixture(autouse=True)
def _empty():
    fsspec.filesystem("memory").store.clear()
    Elsewhere.reset()


@pytest.fixture(params=["memory", "elsewhere", "file", "local"])
def folder(request, tmp_path) -> Url:
    return Url(f"{request.param}://{tmp_path}/folder")


@pytest.mark.parametrize("url", ["gs://a/b", "s3://a/b/", "hf://datasets/me/x", "memory://x", "file:///x", "GS://a"])
def test_a_url_is_remote_and_keeps_its_slashes(url) -> None:
    assert is_remote(url)
    assert location(url) == Url(url.rstrip("/"))
    assert str(location(url)) == url.rstrip("/")
    assert location(location(url)) == location(url)


@pytest.mark.parametrize("path", ["caches/x", "/a/b", "C:/x", "hf:dataset:config", "a:b", "~/x", "."])
def test_everything_else_is_a_path(path) -> None:
    assert not is_remote(path) and location(path) == Path(path) and not is_remote(Path(path))


@pytest.mark.parametrize("lost", [Path("gs://a/b"), Path("s3://a"), Path("hf://datasets/a"), "gs:/a/b"])
def test_a_url_that_was_a_path_is_refused_with_the_url(lost) -> None:
    with pytest.raises(ConfigError, match=r"has lost a slash; write '(gs://a/b|s3://a|hf://datasets/a)', as text"):
        location(lost)


@pytest.mark.parametrize(("run_class", "flag", "field"), [
    (CacheRun, "--output", "output"), (QatRun, "--cache-dir", "cache_dir"), (QatRun, "--kd-cache-dir", "cache_dir"),
    (RecoveryRun, "--kd-cache-dir", "cache_dir"),
])  # fmt: skip
def test_settings_take_urls_where_a_cache_is_meant(run_class, flag, field) -> None:
    run = run_from(_parser().parse_args([run_class.command, flag, "gs://a/b"]), RUNS[run_class.command])
    assert getattr(run, field) == Url("gs://a/b") and type(getattr(run, field)) is Url
    assert to_json(run)[field] == "gs://a/b" and from_json(run_class, to_json(run)) == run
    run = run_from(_parser().parse_args([run_class.command, flag, "a/b"]), RUNS[run_class.command])
    assert getattr(run, field) == Path("a/b")


@pytest.mark.parametrize("argv", [["qat", "--output", "gs://a/b"], ["export", "--output", "s3://a"]])
def test_other_outputs_stay_on_this_machine(argv, capsys) -> None:
    assert main(argv) == 2
    assert "takes a folder of this machine" in capsys.readouterr().err


def test_what_is_written_is_read_back_listed_and_deleted(folder, tmp_path) -> None:
    assert not folder.exists() and file_sizes(folder) == {} and list(folder.glob("*")) == []
    (folder / "a.json").write_bytes(b'{\n  "x": 1\n}\n')
    (folder / "b.bin").write_bytes(b"0123456789")
    (folder / "c.bin").write_bytes(b"uploaded")
    assert file_sizes(folder) == {"a.json": 13, "b.bin": 10, "c.bin": 8}
    assert [str(p) for p in folder.glob("*.bin")] == [f"{folder}/b.bin", f"{folder}/c.bin"]
    assert (folder / "b.bin").read_bytes(2, 5) == b"234" and (folder / "a.json").read_bytes() == b'{\n  "x": 1\n}\n'
    (folder / "c.bin").download(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"uploaded"
    assert b"".join((folder / "c.bin").chunks()) == b"uploaded"
    assert (folder / "a.json").exists() and folder.exists() and not (folder / "d").exists()
    (folder / "b.bin").write_bytes(b"again")
    (folder / "a.json").unlink()
    assert file_sizes(folder) == {"b.bin": 5, "c.bin": 8}
    (folder / "a.json").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "a.json").unlink()
    for read in (Url.read_bytes, lambda place: list(place.chunks())):
        with pytest.raises(FileNotFoundError):
            read(folder / "a.json")


def test_a_file_is_read_piece_by_piece(monkeypatch) -> None:
    monkeypatch.setattr("qat_lora.urls.CHUNK_BYTES", 4)
    place = Url("elsewhere://x/file")
    place.write_bytes(b"0123456789")
    assert list(place.chunks()) == [b"0123", b"4567", b"89"]
    assert Elsewhere.calls["cat_file", "file"] == 3


def test_of_a_file_that_is_too_large_no_more_is_fetched(monkeypatch) -> None:
    place, fetched = Url("elsewhere://x/file"), []
    place.write_bytes(b"0123456789")
    read = Elsewhere.cat_file
    monkeypatch.setattr(Elsewhere, "cat_file", lambda *a, **kw: fetched.append(read(*a, **kw)) or fetched[-1])
    with pytest.raises(ValueError, match="it has more than 4 bytes"):
        read_at_most(place, 4)
    assert fetched == [b"01234"] and read_at_most(place, 10) == b"0123456789"
    assert len(fetched) == 2, "one request each"


def test_being_writable_is_proved_and_leaves_nothing(folder) -> None:
    check_writable(folder)
    assert file_sizes(folder) == {}


@pytest.mark.parametrize("method", ["pipe_file", "mv"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(method) -> None:
    place = Url("elsewhere://x/file")
    place.write_bytes(b"old")
    Elsewhere.failing[method, "file"] = OSError("the line\nis down")
    with pytest.raises(RemoteError) as caught:
        place.write_bytes(b"new")
    assert str(caught.value) == (
        "'elsewhere://x/file' cannot be written (OSError: the line is down); check the URL and the network."
    )
    assert place.read_bytes() == b"old" and file_sizes(place.parent) == {"file": 3}


def test_a_refusal_is_not_taken_for_an_absence() -> None:
    """fsspec's own `exists` answers False to any error."""
    Elsewhere.failing["info", ""] = PermissionError("no")
    assert not fsspec.filesystem("elsewhere").exists("elsewhere://x")
    with pytest.raises(RemoteError, match="cannot be read"):
        Url("elsewhere://x").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://a/b", "'nosuch://a/b.*' cannot be .*Protocol not known.*check the URL"),
        ("gs://a/b", r"pip install 'qat_lora\[gs\]'"),
        ("s3://a/b", r"pip install 'qat_lora\[s3\]'"),
    ],
)
def test_an_unknown_protocol_or_a_missing_package_is_one_sentence(url, words, monkeypatch) -> None:
    for package in ("gcsfs", "s3fs"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    for touch in (lambda p: p.exists(), lambda p: p.sizes(), lambda p: p.write_bytes(b""), check_writable):
        with pytest.raises(RemoteError, match=words) as caught:
            touch(Url(url))
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("scheme", "fix"), [("gs", "gcloud auth"), ("s3", "aws configure"), ("hf", "hf auth login"), ("gcs", "gcloud")]
)
def test_a_refusal_says_how_to_log_in(scheme, fix, monkeypatch) -> None:
    place = Url(f"{scheme}://bucket/cache")
    monkeypatch.setattr(Url, "_opened", lambda self: (fsspec.filesystem("elsewhere"), "/bucket/cache"))
    for method, act in (("pipe_file", check_writable), ("ls", Url.sizes), ("info", Url.exists)):
        Elsewhere.failing = {(method, ""): PermissionError("Anonymous caller")}
        with pytest.raises(RemoteError, match=f"Anonymous caller.*{fix}"):
            act(place)
    Elsewhere.failing = {("pipe_file", ""): FileNotFoundError("The specified bucket does not exist")}
    with pytest.raises(RemoteError, match=f"bucket does not exist.*{fix}"):
        check_writable(place)


def test_our_own_errors_pass_unchanged() -> None:
    Elsewhere.failing["cat_file", ""] = ConfigError("ours")
    with pytest.raises(QatLoraError, match="^ours$"):
        Url("elsewhere://x").read_bytes()


@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("info", Url.exists), ("ls", lambda p: file_sizes(p.parent)), ("cat_file", Url.read_bytes),
        ("cat_file", lambda p: list(p.chunks())), ("get_file", lambda p: p.download(Path("/dev/null"))),
        ("rm_file", Url.unlink),
        ("pipe_file", lambda p: p.write_bytes(b"again")), ("mv", lambda p: p.write_bytes(b"again")),
    ],
)  # fmt: skip
def test_a_failure_that_passes_is_tried_again_and_one_that_stays_is_an_error(method, act, monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(urls, "RETRY_SECONDS", (0.5, 2.0, 8.0))
    monkeypatch.setattr(urls.time, "sleep", waits.append)
    place = Url("elsewhere://x/file")
    place.write_bytes(b"old")
    Elsewhere.flaky[method, ""] = 3
    act(place)
    assert waits == [0.5, 2.0, 8.0] and Elsewhere.flaky[method, ""] == 0
    place.write_bytes(b"old")
    Elsewhere.flaky[method, ""] = 99
    with pytest.raises(RemoteError, match="TimeoutError: the line is slow"):
        act(place)
    assert Elsewhere.flaky[method, ""] == 95, "four attempts and no more"


@pytest.mark.parametrize("error", [PermissionError("no"), ImportError("no"), ValueError("no")])
def test_what_another_attempt_cannot_change_is_not_tried_again(error) -> None:
    Elsewhere.failing["cat_file", ""] = error
    with pytest.raises(RemoteError):
        Url("elsewhere://x/file").read_bytes()
    assert Elsewhere.calls["cat_file", "file"] == 1


def test_what_another_process_wrote_is_seen_though_listings_are_kept() -> None:
    folder = Url("elsewhere://x")
    (folder / "a").write_bytes(b"1")
    assert folder.sizes() == {"a": 1} and not (folder / "b").exists()
    fs, path = (folder / "b")._opened()
    fs.ls(path.rsplit("/", 1)[0])  # fsspec keeps this listing
    Elsewhere.store[path] = Elsewhere.store[path.replace("/b", "/a")]  # past this process's filesystem
    assert not fs.exists(path), "the listing answers"
    assert (folder / "b").exists()
    fs.ls(path.rsplit("/", 1)[0])
    Elsewhere.store[path.replace("/b", "/c")] = Elsewhere.store[path]
    assert folder.sizes() == {"a": 1, "b": 1, "c": 1}
