"""`qat-lora cache info|merge|split|convert`: what is done with caches that are there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qat_lora.cli.flags import Parser, add_flags, run_from
from qat_lora.config.cache import ConvertRun, MergeRun, SplitRun
from qat_lora.errors import ConfigError
from qat_lora.urls import Location, is_remote, location

_Made = list[tuple[Path, Any]]  # the folders of caches, each with its index


def add_operations(command: argparse.ArgumentParser, add_common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the acts below `qat-lora cache`, beside its building of one."""
    about = command.add_subparsers(dest="about", metavar="ACT", parser_class=Parser)
    text = "What a cache holds: bytes per token, kept mass, entropy, source; its files' digests with --verify."
    info = about.add_parser("info", help=text, description=text)
    info.set_defaults(parser=info)
    info.add_argument("directory", metavar="DIR", help="folder or URL of a cache, finished or not")
    info.add_argument("--verify", action="store_true", help="read every byte and compare it with what was recorded")
    for name, (run_class, _) in _ACTS.items():
        text = (run_class.__doc__ or "").split(": ", 1)[-1].splitlines()[0]
        act = about.add_parser(name, help=text, description=text)
        if run_class is MergeRun:
            act.add_argument("directories", metavar="DIR", nargs="+", help="folders of caches or of parts")
        else:
            act.add_argument("directory", metavar="DIR", help="folder of a finished cache")
        add_flags(act, run_class)
        add_common(act)


def operate(args: argparse.Namespace) -> None:
    """Do what the subcommand says."""
    if args.about == "info":
        _info(location(args.directory), verify=args.verify)
        return
    from qat_lora.cli.progress import counted

    run_class, act = _ACTS[args.about]
    folders = [_local(folder) for folder in getattr(args, "directories", None) or [args.directory]]
    run = run_from(args, run_class)
    with counted(args.about) as progress:
        made = act(run, folders, progress)
    for folder, index in made:
        manifest, shards = index.manifest, len(index.shards)
        rows = f"{index.rows}{'' if index.complete else f' of {manifest.rows}'} rows of {manifest.seq_len} tokens"
        print(f"{folder}: {rows} in {shards} shard{'' if shards == 1 else 's'}")


def _local(folder: str) -> Path:
    if is_remote(folder):
        raise ConfigError(
            f"{folder} is a URL, but merge, split and convert read folders of this machine; copy it here."
        )
    return Path(folder)


def _info(directory: Location, *, verify: bool) -> None:
    from rich import print as rich_print

    from qat_lora import cache
    from qat_lora.cli.info import cache_table

    index = cache.verify(directory) if verify else None  # first, since it names all that is damaged
    summary = cache.summarise(directory)
    print(directory)  # a path is never wrapped
    rich_print(cache_table(summary))
    if index is not None:
        print(f"{directory}: {len(index.shards)} shards, every byte as recorded")


def _merge(run: Any, folders: Sequence[Path], progress: Any) -> _Made:
    from qat_lora import cache

    return [(run.output, cache.merge(folders, run.output, rows_per_shard=run.rows_per_shard, progress=progress))]


def _split(run: Any, folders: Sequence[Path], progress: Any) -> _Made:
    from qat_lora import cache

    if bool(run.parts) == bool(run.rows):
        raise ConfigError(
            f"a cache is split either into parts or by rows, but parts={run.parts} and rows={run.rows}; give --parts N "
            "for parts to copy, or --rows N for two caches."
        )
    split = cache.split_parts if run.parts else cache.split_rows
    return split(folders[0], run.output, run.parts or run.rows, progress=progress)


def _convert(run: Any, folders: Sequence[Path], progress: Any) -> _Made:
    from qat_lora import cache

    settings = {name: getattr(run, name) for name in ("top_k", "temperatures", "logprob_bits", "rows_per_shard")}
    return [(run.output, cache.convert(folders[0], run.output, progress=progress, **settings))]


_ACTS = {"merge": (MergeRun, _merge), "split": (SplitRun, _split), "convert": (ConvertRun, _convert)}
