"""`qat-lora`: parse, build the run, call one function, print what came out.

A user's mistake is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qat_lora import __version__
from qat_lora.cli.flags import Parser, add_flags, launch_of, run_from
from qat_lora.cli.operations import add_operations, operate
from qat_lora.config import AnyRun, EvalRun, ExportRun, QatRun, RecoveryRun
from qat_lora.config.cache import CacheRun
from qat_lora.errors import ConfigError, QatLoraError

# What the world does to a running program, as against a file that we forgot to look for.
_OUTSIDE = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EIO)

RUNS: dict[str, type[AnyRun | CacheRun]] = {r.command: r for r in (CacheRun, QatRun, RecoveryRun, EvalRun, ExportRun)}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    args, words = None, sys.argv[1:] if argv is None else argv
    try:
        args, unknown = _parser().parse_known_args(words)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        act = getattr(args, "about", None)
        if act is not None and words[1] != act:  # flags of the build, over which the act's own defaults would go
            raise ConfigError(
                f"{words[1]} stands before {act!r}; write qat-lora {args.command} {act} and then the flags."
            )
        _start_logging(quiet=args.quiet or args.command == "demo")  # its bars say enough
        if getattr(args, "num_chips", None) is not None:
            return _on_chips(args, words)
        _COMMANDS[args.command](args)
        return 0
    except QatLoraError as error:
        return _end(2, "error", str(error))
    except OSError as error:
        if error.errno not in _OUTSIDE:
            raise
        where = error.filename or "writing"
        return _end(2, "error", f"{where}: {error.strerror}; free space or give another --output")
    except KeyboardInterrupt:
        return _end(130, "interrupted", _how_to_continue(args))


def _end(code: int, what: str, words: str) -> int:
    """Say why the command ends, and of several ranks which one it is."""
    rank = f" (rank {os.environ.get('RANK')})" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"qat-lora: {what}{rank}: {words}", file=sys.stderr)
    return code


def _how_to_continue(args: argparse.Namespace | None) -> str:
    """What to do after an interruption, which is not always to resume."""
    if args is None or args.command not in ("qat", "recover"):
        return "run the command again; a cache continues with what is missing"
    from qat_lora.train.folder import how_to_continue

    run: Any = run_from(args, RUNS[args.command])
    return how_to_continue(run.output)


def _on_chips(args: argparse.Namespace, argv: list[str]) -> int:
    """Run a command once in each of the processes that a TPU's chips get."""
    run: Any = run_from(args, RUNS[args.command])  # whose mistakes are told once
    if args.num_chips < 0 or run.place.device not in ("auto", "tpu"):
        raise ConfigError(
            f"--num-chips={args.num_chips} with --device {run.place.device}: it counts TPU chips, 0 being all; on GPUs "
            "and CPUs use torchrun."
        )
    if (shard := getattr(getattr(run, "execution", None), "shard", "none")) != "none":
        raise ConfigError(
            f"--num-chips starts a process per chip with a model on each, but shard={shard}; use the script without "
            "_multi, without --num-chips."
        )
    from qat_lora.runtime.xla.chips import launch

    counting = argparse.ArgumentParser(add_help=False)
    counting.add_argument("--num-chips")
    of_one_rank = [*counting.parse_known_args(argv)[1], "--device", "tpu"]  # whatever `auto` would take
    return launch(main, of_one_rank, chips=args.num_chips)


def _cache(args: argparse.Namespace) -> None:
    if args.about is not None:
        return operate(args)
    from qat_lora.cli import commands

    run: Any = run_from(args, CacheRun)
    index = commands.cache(run)
    manifest = index.manifest
    what = f"rows of {manifest.seq_len} tokens, {manifest.contents}"
    if run.part_of == (1, 1):
        _say(f"{run.output}: {manifest.rows} {what}")
        return _say(f"next: qat-lora qat --cache-dir {run.output}")
    _say(
        f"{run.output}: part {run.part}, {index.rows} of {manifest.rows} {what}; "
        f"copy the files of all {run.part_of[1]} parts into one folder, which is the cache"
    )


def _qat(args: argparse.Namespace) -> None:
    from qat_lora.cli import commands

    run: Any = run_from(args, QatRun)
    result = commands.qat(run, launch=launch_of(args))
    _say_trained(result)
    _say(f"next: qat-lora recover --checkpoint {result.best} --cache-dir {run.cache_dir}")


def _recover(args: argparse.Namespace) -> None:
    from qat_lora.cli import commands

    run: Any = run_from(args, RecoveryRun)
    result = commands.recover(run, launch=launch_of(args))
    _say_trained(result)
    _say(f"next: qat-lora eval --checkpoint {result.best} --data HELD_OUT_TEXT")


def _eval(args: argparse.Namespace) -> None:
    from rich import print as rich_print

    from qat_lora.cli.evaluation import evaluate
    from qat_lora.evaluate import fidelity_table, write_fidelity

    rows, path = evaluate(run_from(args, EvalRun))  # type: ignore[arg-type]
    rich_print(fidelity_table(rows))  # before it is written: a full disk loses nothing
    replaced = write_fidelity(path, rows)
    print(f"written to {path}" + (f", in the place of earlier rows: {', '.join(replaced)}" if replaced else ""))
    if checkpoint := rows[-1].checkpoint:
        _say(f"next: qat-lora export --checkpoint {checkpoint} --output NEW_FOLDER")


def _export(args: argparse.Namespace) -> None:
    from qat_lora.cli.exporting import export

    run: Any = run_from(args, ExportRun)
    how = "equal to the student up to rounding" if run.format == "merged" else "equal to the student bit for bit"
    print(f"{export(run)}: {run.format}, reloaded, logits {how}; how to load it: {run.output / 'README.md'}")


def _demo(args: argparse.Namespace) -> None:
    from qat_lora.cli.demo import demo

    demo(
        Path(args.output),
        preset=args.preset,
        device=args.device,
        steps_factor=args.steps_factor,
        rows_factor=args.rows_factor,
    )


def _say_trained(result: Any) -> None:
    state = result.state
    _say(
        f"{result.best}: held-out KL {state.best_kl:.4f} after {state.best_step} steps "
        f"({state.first_kl:.4f} before the first, {state.last_kl:.4f} after the last)"
    )


def _say(text: str) -> None:
    """Print what came out, or which command comes next; of several ranks the first speaks."""
    from qat_lora.cli.progress import IS_FIRST_RANK

    if IS_FIRST_RANK:
        print(text)


class _AboveBars(logging.Handler):
    """Writes log lines through the console that draws the bars, so that neither tears the other."""

    def emit(self, record: logging.LogRecord) -> None:
        from qat_lora.cli.progress import console

        console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "cache": _cache,
    "qat": _qat,
    "recover": _recover,
    "eval": _eval,
    "export": _export,
    "demo": _demo,
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="qat-lora", description="Low-bit language models: cache, qat, recover, eval, export.")
    parser.add_argument("--version", action="version", version=f"qat-lora {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, run_class in RUNS.items():
        text = (run_class.__doc__ or "").split(": ", 1)[-1].splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        add_flags(command, run_class)
        _add_common(command)
        if run_class is CacheRun:
            add_operations(command, _add_common)
    text = "All five steps on the embedded teacher, in a few minutes on two cores."
    command = commands.add_parser("demo", help=text, description=text)
    command.add_argument("--output", default="runs/demo", help="folder of the demo, made anew [runs/demo]")
    command.add_argument("--preset", default="q2_g32", help="scheme to demonstrate [q2_g32]")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, mps or tpu [auto]")
    command.add_argument("--steps-factor", type=float, default=1.0, help="multiplies every number of steps [1.0]")
    command.add_argument("--rows-factor", type=float, default=1.0, help="multiplies the rows of the cache [1.0]")
    _add_common(command)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.set_defaults(parser=command)
    command.add_argument("--quiet", action="store_true", help="no log lines, only bars, warnings and results")


def _start_logging(*, quiet: bool) -> None:
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        handlers=[_AboveBars()],
    )
    for noisy in ("httpx", "matplotlib", "datasets", "huggingface_hub", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs with a traceback what it raises


if __name__ == "__main__":
    sys.exit(main())
