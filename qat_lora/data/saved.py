"""Token rows kept on the disk while a cache is built, so that a build that continues does not tokenise again.

Owns the file and what it is named by. What the rows are, and when the file goes, others say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from qat_lora.data.paths import find_files, is_local
from qat_lora.data.rows import TokenRows

PREFIX = ".rows-"


def rows_file(folder: Path, spec: str, *settings: Any) -> Path:
    """Where the rows of a source are kept, named by all on which they depend.

    Of files: their names, sizes and times. Of a hub: the name alone, so a build continues with the rows that it began
    with. Of the embedded corpus: the version of Python.
    """
    files = (
        [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in find_files(spec)] if is_local(spec) else []
    )
    what = json.dumps([spec, files, sys.version, settings], sort_keys=True, default=str)
    return folder / f"{PREFIX}{hashlib.sha256(what.encode()).hexdigest()[:16]}.safetensors"


def rows_content(rows: TokenRows) -> bytes:
    """The file of some rows."""
    arrays = {
        f.name: np.ascontiguousarray(x)
        for f in dataclasses.fields(rows)
        if isinstance(x := getattr(rows, f.name), np.ndarray)
    }
    words = json.dumps({"bos": rows.bos, "digest": rows.digest()})  # one word: safetensors writes several in any order
    content: bytes = save(arrays, {"rows": words})
    return content


def load_rows(path: Path, make: Callable[[], TokenRows]) -> TokenRows:
    """The rows that are kept, or those that are made where there are none or the file is damaged."""
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            words = json.loads(file.metadata()["rows"])
        bos = words["bos"]
        optional = {"starts_RT": None, "answer_RT": None}
        rows = TokenRows(**{**optional, **arrays}, bos=None if bos is None else tuple(bos))
        if rows.digest() == words["digest"]:
            return rows
    except (FileNotFoundError, NotADirectoryError, SafetensorError, TypeError, KeyError, ValueError):
        pass
    return make()


def forget_rows(folder: Path) -> None:
    """Remove what is kept in a folder."""
    for path in folder.glob(f"{PREFIX}*.safetensors"):
        path.unlink(missing_ok=True)
