"""Windows has neither `resource` nor `fcntl`: the whole package must be importable without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, pkgutil, sys, warnings
sys.modules |= {"resource": None, "fcntl": None}  # an import of them fails
import qat_lora
warnings.simplefilter("ignore")
found = [module.name for module in pkgutil.walk_packages(qat_lora.__path__, "qat_lora.")]
found = [name for name in found if not name.endswith("__main__")]
for name in found:
    importlib.import_module(name)
from pathlib import Path
from qat_lora.runtime.memory import MemoryUse, process_memory
Path.exists = lambda path: False  # nor /proc
assert process_memory() == MemoryUse(0, 0, 0), process_memory()
print(len(found))
"""


def test_every_module_imports_without_what_windows_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path for path in (Path(__file__).parents[1] / "qat_lora").rglob("*.py") if path.name != "__main__.py"]
    assert int(done.stdout) == len(files) - 1, "all but qat_lora itself"
