"""The notebooks: what they may contain, that their commands are valid at the full settings, and one run at the small.

The run has a disconnect in it: the notebook is executed up to a point, its machine is wiped, and then all of it is
executed. Storage is a bucket; `gcloud` is a stand-in that knows the two commands the notebook uses.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from qat_lora.cli.flags import run_from
from qat_lora.cli.main import RUNS, _parser

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TPU = ROOT / "notebooks" / "TPU_LoRA_KD_WikiText1024.ipynb"
COMMAND_OF = {
    "build_kd_cache": "cache",
    "train_qat": "qat",
    "train_recovery_lora": "recover",
    "evaluate": "eval",
    "export": "export",
}
SHELL_LINE = re.compile(r"^(\s*)!((?:.*\\\n)*.*)$", re.MULTILINE)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells_of(path: Path, kind: str = "") -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if kind in ("", cell["cell_type"])]


def python_of(cell: dict) -> ast.Module:
    """A cell without its shell lines."""
    return ast.parse(SHELL_LINE.sub(r"\1pass", "".join(cell["source"])))


@each_notebook
def test_is_stripped_of_outputs_and_has_no_metadata_beyond_its_kernel(path) -> None:
    tree = json.loads(path.read_text())
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    assert tree["metadata"].keys() == {"kernelspec", "language_info"}
    assert tree["metadata"]["kernelspec"]["name"] == "python3"
    assert tree["metadata"]["language_info"].keys() == {"name"}
    ids = [cell["id"] for cell in tree["cells"]]
    assert len(ids) == len(set(ids)) and all(ids)
    for cell in tree["cells"]:
        assert cell["metadata"] == {}, cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]


@each_notebook
def test_defines_nothing_that_belongs_in_the_package(path) -> None:
    reusable = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    for cell in cells_of(path, "code"):
        assert not [node for node in ast.walk(python_of(cell)) if isinstance(node, reusable)], cell["id"]


@each_notebook
def test_says_why_before_every_cell(path) -> None:
    cells = cells_of(path)
    for before, cell in zip([{"cell_type": "none"}, *cells], cells, strict=False):
        if cell["cell_type"] == "code":
            assert before["cell_type"] == "markdown", cell["id"]
            prose = [line for line in "".join(before["source"]).splitlines() if not line.startswith("#")]
            assert re.search(r"\w{3,} .*\w[`*)]*\.", "\n".join(prose)), f"no sentence before {cell['id']}"


@each_notebook
def test_a_failing_command_stops_it(path) -> None:
    """IPython goes on after a shell line that failed."""
    for cell in cells_of(path, "code"):
        if any("PYTHON" in line and "uninstall" not in line for _, line in SHELL_LINE.findall("".join(cell["source"]))):
            assert "assert _exit_code == 0" in "".join(cell["source"]), cell["id"]


@pytest.mark.parametrize("small", ["", "1"])
def test_its_commands_are_valid_runs_of_every_step(small, monkeypatch) -> None:
    """Only the small settings are ever executed here, so the full ones are at least parsed and checked."""
    monkeypatch.setenv("PJRT_DEVICE", os.environ.get("PJRT_DEVICE", ""))  # the small settings change it
    monkeypatch.setenv("QAT_LORA_SMALL", small)
    monkeypatch.delenv("QAT_LORA_STORAGE", raising=False)
    names, found = {}, {}
    for cell in cells_of(TPU, "code"):
        body = python_of(cell).body
        settings = body if cell["id"] == "settings" else [n for n in body if isinstance(n, ast.Assign)]
        exec(compile(ast.Module(settings, []), cell["id"], "exec"), names)
        for _, line in SHELL_LINE.findall("".join(cell["source"])):
            if script := re.search(r"scripts/(\w+)\.py (.*)", line.replace("\\\n", " ")):
                words = shlex.split(script[2].format_map(names))
                args = _parser().parse_args([COMMAND_OF[script[1]], *words])
                found[cell["id"]] = run_from(args, RUNS[args.command])
    assert names["SMALL"] == bool(small)
    assert [run.command for run in found.values()] == ["cache", "qat", "recover", "eval", "eval", "export"]
    cache, qat, recover, _, _, export = found.values()
    assert cache.output == qat.cache_dir == recover.cache_dir
    assert (recover.checkpoint, export.checkpoint) == (f"{qat.output}/best.pt", f"{recover.output}/best.pt")
    assert {run.model for run in found.values() if run is not cache} == {cache.teacher}
    assert all(run.execution.scan_layers and run.place.device == "tpu" for run in (qat, recover))
    if not small:
        assert (cache.teacher, cache.seq_len, cache.top_k) == ("Qwen/Qwen3-0.6B", 1024, 128)
        assert cache.data == "hf:Salesforce/wikitext:wikitext-103-raw-v1"


def test_a_finished_cache_is_downloaded_whole_and_one_that_is_there_left_alone(cache_dir, tmp_path) -> None:
    (cell,) = [cell for cell in cells_of(TPU, "code") if cell["id"] == "cache-download"]
    source = "".join(cell["source"])
    (tmp_path / "cache.part").mkdir()  # of a download that was cut off
    here = tmp_path / "cache"
    exec(source, {"CACHE_FROM": "", "CACHE": here})
    assert not here.exists(), "nothing is asked for"
    exec(source, {"CACHE_FROM": f"file://{cache_dir}", "CACHE": here})
    names = sorted(path.relative_to(cache_dir) for path in cache_dir.rglob("*") if path.is_file())
    assert names and names == sorted(path.relative_to(here) for path in here.rglob("*") if path.is_file())
    assert all((here / name).read_bytes() == (cache_dir / name).read_bytes() for name in names)
    exec(source, {"CACHE_FROM": "file:///nowhere", "CACHE": here})


STAND_IN = """#!{python}
import os, re, shutil, sys
from pathlib import Path

def local(name):
    return Path(name.replace("gs://", os.environ["BUCKETS"] + "/"))

storage, verb, *words = sys.argv[1:]
flags = [word for word in words if word.startswith("--")]
source, target = (word for word in words if not word.startswith("--"))
with open(os.environ["BUCKETS"] + "/calls", "a") as calls:
    print(verb, *words, file=calls)
if verb == "cp":
    local(target).parent.mkdir(parents=True, exist_ok=True)
    local(target).write_bytes(sys.stdin.buffer.read())
    sys.exit(0)
skip = [re.compile(flag.split("=", 1)[1]) for flag in flags if flag.startswith("--exclude=")]
source, target = local(source), local(target)
if not source.is_dir():
    sys.exit("no such container")
for path in source.rglob("*"):
    name, there = str(path.relative_to(source)), target / path.relative_to(source)
    if path.is_dir() or any(pattern.match(name) for pattern in skip):
        continue
    newer = there.exists() and there.stat().st_mtime > path.stat().st_mtime
    if newer and "--skip-if-dest-has-newer-mtime" in flags:
        continue
    there.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(path, there.with_name(there.name + ".part" + str(os.getpid())))
    except FileNotFoundError:
        continue  # replaced meanwhile
    os.replace(there.with_name(there.name + ".part" + str(os.getpid())), there)
"""


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="nbclient is not installed; see the notebook extra"
)
def test_the_small_notebook_runs_through_and_goes_on_after_a_disconnect(tmp_path, monkeypatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    buckets, programs = tmp_path / "buckets", tmp_path / "bin"
    buckets.mkdir()
    programs.mkdir()
    (programs / "gcloud").write_text(STAND_IN.format(python=sys.executable))
    (programs / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("BUCKETS", str(buckets))
    monkeypatch.setenv("QAT_LORA_SMALL", "1")
    monkeypatch.setenv("QAT_LORA_SOURCE", str(ROOT))
    monkeypatch.setenv("QAT_LORA_STORAGE", "gs://bucket/runs of qat_lora")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a shared machine starves spinning threads
    notebook = nbformat.read(TPU, as_version=4)
    nbformat.validate(notebook)

    def execute(cells: list, machine: Path) -> None:
        machine.mkdir()
        part = nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)
        NotebookClient(part, timeout=600, resources={"metadata": {"path": str(machine)}}).execute()

    ids = [cell.id for cell in notebook.cells]
    execute(notebook.cells[: ids.index("qat") + 1] + notebook.cells[-1:], tmp_path / "first machine")
    stored = buckets / "bucket" / "runs of qat_lora"
    student = hashlib.sha256((stored / "qat_q2_g32" / "last.pt").read_bytes()).digest()
    assert not (stored / "recovery_q2_g32").exists()
    uploads = [line for line in (buckets / "calls").read_text().splitlines() if "--exclude" in line]
    assert len(uploads) > 1, "nothing was copied while the cells ran"
    shutil.rmtree(tmp_path / "first machine")

    execute(notebook.cells, tmp_path / "second machine")
    assert hashlib.sha256((stored / "qat_q2_g32" / "last.pt").read_bytes()).digest() == student, "QAT ran again"
    for stage in ("qat", "recovery"):
        summary = json.loads((stored / f"{stage}_q2_g32" / "summary.json").read_text())
        assert (summary["steps"], summary["compilations_after_first_step"]) == (6, 0)
        row = json.loads((stored / f"{stage}_q2_g32" / "fidelity.json").read_text())[0]
        assert math.isfinite(row["kl"]) and math.isfinite(row["perplexity"])
    assert (stored / "adapter_q2_g32" / "adapter_model.safetensors").is_file()
