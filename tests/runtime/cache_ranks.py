"""Cache builds that several ranks run (see `tests.runtime.forked`); each takes TEACHER TEXT OUTPUT."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from qat_lora.cache import write as writer
from qat_lora.cli.main import main

ROWS, ROWS_PER_SHARD = 52, 8  # 7 shards, the last one of 4 rows


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def arguments(teacher: Path | str, text: Path | str, output: Path | str, **changes: object) -> list[str]:
    """The command line of the build, with the flags in `changes` replaced or added."""
    flags = {
        "teacher": teacher, "data": text, "output": output, "seq_len": 24, "top_k": 8, "temperatures": "1,2",
        "max_rows": ROWS, "rows_per_shard": ROWS_PER_SHARD, "batch_size": 4, "device": "cpu",
    } | changes  # fmt: skip
    return ["cache", *(str(x) for name, v in flags.items() for x in (f"--{name.replace('_', '-')}", v)), "--quiet"]


def killed(teacher: str, text: str, output: str) -> int:
    """Rank 1 is killed by the system when half of its second shard is in a temporary file."""
    write, shards = writer.write_file, []

    def cut(path: Path, content: bytes, **options) -> bool:
        shards.append(path)
        if own_rank() == 1 and len(shards) == 2:
            path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.1.tmp").write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, content, **options)

    writer.write_file = cut
    return main(arguments(teacher, text, output))


def slow(teacher: str, text: str, output: str) -> int:
    """The other ranks are done long before rank 1."""
    write = writer.CacheWriter.write_encoded

    def late(self, index, tensors) -> None:
        time.sleep(own_rank() == 1)
        write(self, index, tensors)

    writer.CacheWriter.write_encoded = late
    return main(arguments(teacher, text, output))


def disagreeing(teacher: str, text: str, output: str) -> int:
    """Rank 1 was asked for another number of candidates."""
    return main(arguments(teacher, text, output, top_k=8 - own_rank()))
