"""`qat-lora cache info|merge|split|convert`: what is done with caches that are there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qat_lora.cli.flags import Parser, add_flags, run_from
from qat_lora.config.cache import ConvertRun, MergeRun, SplitRun
from qat_lora.errors import ConfigError
from qat_lora.files import is_remote, location

_Act = Callable[[argparse.Namespace], None]


def add_operations(command: argparse.ArgumentParser, add_common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the acts below `qat-lora cache`, beside its building of one."""
    about = command.add_subparsers(dest="about", metavar="ACT", parser_class=Parser)
    text = "What a cache holds: bytes per token, kept mass, entropy, source; its files' digests with --verify."
    info = about.add_parser("info", help=text, description=text)
    info.set_defaults(parser=info)
    info.add_argument("directory", metavar="DIR", help="folder or URL of a cache, finished or not")
    info.add_argument("--verify", action="store_true", help="read every byte and compare it with what was recorded")
    for run_class in (MergeRun, SplitRun, ConvertRun):
        text = (run_class.__doc__ or "").split(": ", 1)[-1].splitlines()[0]
        act = about.add_parser(run_class.command.split()[-1], help=text, description=text)
        if run_class is MergeRun:
            act.add_argument("directories", metavar="DIR", nargs="+", help="folders of caches or of parts")
        else:
            act.add_argument("directory", metavar="DIR", help="folder of a finished cache")
        add_flags(act, run_class)
        add_common(act)


def operate(args: argparse.Namespace) -> None:
    """Do what the subcommand says."""
    acts: dict[str, _Act] = {"info": _info, "merge": _merge, "split": _split, "convert": _convert}
    if args.about != "info":
        folders = [_local(folder) for folder in getattr(args, "directories", None) or [args.directory]]
        args.directories, args.directory = folders, folders[0]
    acts[args.about](args)


def _local(folder: str) -> Path:
    if is_remote(folder):
        raise ConfigError(
            f"{folder} is a URL, but merge, split and convert read folders of this machine; copy it here."
        )
    return Path(folder)


def _info(args: argparse.Namespace) -> None:
    from rich import print as rich_print

    from qat_lora.cache import summarise, verify
    from qat_lora.cli.info import cache_table

    directory = location(args.directory)
    index = verify(directory) if args.verify else None  # first, since it names all that is damaged
    summary = summarise(directory)
    print(directory)  # a path is never wrapped
    rich_print(cache_table(summary))
    if index is not None:
        print(f"{directory}: {len(index.shards)} shards, every byte as recorded")


def _merge(args: argparse.Namespace) -> None:
    from qat_lora.cache import merge
    from qat_lora.cli.progress import counted

    run: Any = run_from(args, MergeRun)
    with counted("merge") as progress:
        index = merge(args.directories, run.output, rows_per_shard=run.rows_per_shard, progress=progress)
    _say(run.output, index)


def _split(args: argparse.Namespace) -> None:
    from qat_lora.cache import split_parts, split_rows
    from qat_lora.cli.progress import counted

    run: Any = run_from(args, SplitRun)
    if bool(run.parts) == bool(run.rows):
        raise ConfigError(
            f"a cache is split either into parts or by rows, but parts={run.parts} and rows={run.rows}; give --parts N "
            "for parts to copy, or --rows N for two caches."
        )
    with counted("split") as progress:
        if run.parts:
            made = split_parts(args.directory, run.output, run.parts, progress=progress)
        else:
            made = split_rows(args.directory, run.output, run.rows, progress=progress)
    for folder, index in made:
        _say(folder, index)


def _convert(args: argparse.Namespace) -> None:
    from qat_lora.cache import convert
    from qat_lora.cli.progress import counted

    run: Any = run_from(args, ConvertRun)
    settings = {name: getattr(run, name) for name in ("top_k", "temperatures", "logprob_bits", "rows_per_shard")}
    with counted("convert") as progress:
        index = convert(args.directory, run.output, progress=progress, **settings)
    _say(run.output, index)


def _say(folder: Path, index: Any) -> None:
    manifest, shards = index.manifest, len(index.shards)
    of = "" if index.complete else f" of {manifest.rows}"
    print(f"{folder}: {index.rows}{of} rows of {manifest.seq_len} tokens in {shards} shard{'' if shards == 1 else 's'}")
