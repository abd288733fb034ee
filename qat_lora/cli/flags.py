"""Command-line flags, made from the config dataclasses, so that no script can disagree with another.

Every leaf field of a run becomes ``--its-name``, with the spellings in its metadata beside it; a quantisation scheme
is reached by ``--preset`` and ``--set scheme.mlp.bits=3``. Precedence, weakest first: preset, ``--settings FILE``,
flags, ``--set``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from qat_lora.config import AnyRun, QatRun, presets
from qat_lora.config.cache import AnyCacheRun
from qat_lora.errors import ConfigError, did_you_mean
from qat_lora.remote import Location
from qat_lora.settings import leaves, load_settings, override, override_text

# What knows how to share its work with other ranks.
COMMANDS_OF_RANKS = ("cache", "qat", "recover")

# Flags of one launch, not of the run: they are no part of its config.
_LAUNCH_FLAGS = {
    "resume": "go on from last.pt in --output; starts at the beginning where there is none",
    "from_scratch": "start anew, even where --output holds a run",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence with the nearest known flag."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        words = message.split()
        if message.startswith("unrecognized arguments:"):
            known = [s for action in self._actions for s in action.option_strings]
            flag = words[2].split("=")[0]
            raise ConfigError(f"flag {flag!r} is unknown to `{self.prog}`.{did_you_mean(flag, known)}")
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


def add_flags(parser: argparse.ArgumentParser, run_class: type[AnyRun | AnyCacheRun]) -> None:
    """Add a flag for every leaf of the run, and those of the launch where it trains."""
    found, defaults = leaves(run_class), run_class()
    for path, (field, hint) in found.items():
        if path.startswith("scheme."):
            continue
        names = [f"--{field.name.replace('_', '-')}", *field.metadata.get("flags", ())]
        options: dict[str, Any] = {
            "dest": path,
            "default": None,
            "help": f"{field.metadata.get('help', '')} [{_shown(defaults, path)}]".replace("%", "%%"),
        }
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(hint, field.name)
        parser.add_argument(*dict.fromkeys(names), **options)
    if "place.device" in found:
        text = "short for --device tpu"
        parser.add_argument("--tpu", dest="place.device", action="store_const", const="tpu", help=text)
    if "execution.gradient_checkpointing" in found:
        text = "short for --gradient-checkpointing off"
        name = "execution.gradient_checkpointing"
        parser.add_argument("--no-gradient-checkpointing", dest=name, action="store_const", const="off", help=text)
    if run_class.command in COMMANDS_OF_RANKS:
        text = "TPU chips to use, a process for each; 0: as many as TPU_NUM_DEVICES says, or all of the host"
        parser.add_argument("--num-chips", metavar="N", type=int, default=None, help=f"{text} [one, in this process]")
    if "loop.max_steps" in found:
        for name, text in _LAUNCH_FLAGS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name, action="store_true", help=text)
    parser.add_argument(
        "--settings", metavar="FILE", type=Path, help=".json or .yaml file of settings, under the flags"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any setting by its dotted path; may be repeated",
    )


def run_from(args: argparse.Namespace, run_class: type) -> AnyRun | AnyCacheRun:
    """Build the run that the flags describe; raises ConfigError at a value out of range or an unknown key."""
    given = vars(args)
    run: Any = run_class()
    if run_class is QatRun:
        run = presets.qat_run(_preset_name(given, run))
    if args.settings is not None:
        chosen = run.preset if run_class is QatRun and _preset_given(given) else None
        run = load_settings(run, args.settings)
        if chosen not in (None, getattr(run, "preset", None)):
            raise ConfigError(
                f"preset {chosen!r} contradicts preset {run.preset!r} in {args.settings}; drop one of them."
            )
    for path in leaves(run_class):
        if given.get(path) is not None:
            run = override(run, path, given[path])
    for assignment in args.set:
        run = override_text(run, assignment)
    return run


def launch_of(args: argparse.Namespace) -> Any:
    """Return how a training command is launched: ``new``, ``resume`` or ``from_scratch``."""
    if args.resume and args.from_scratch:
        raise ConfigError("--resume goes on with a run and --from-scratch starts anew; give one of them.")
    return "resume" if args.resume else "from_scratch" if args.from_scratch else "new"


def _preset_name(given: dict[str, Any], run: QatRun) -> str:
    """The preset must be known before anything else is laid over it, wherever it was written."""
    if named := _preset_given(given):
        return named
    if given["settings"] is not None:
        return load_settings(run, given["settings"]).preset
    return run.preset


def _preset_given(given: dict[str, Any]) -> str:
    """The preset named by --set or by its flag; empty where neither does."""
    pairs = [[part.strip() for part in assignment.split("=", 1)] for assignment in given["set"]]
    by_set = [pair[1] for pair in pairs if pair[0] == "preset" and len(pair) > 1]
    return by_set[-1] if by_set else str(given.get("preset") or "")


def _shown(config: Any, path: str) -> str:
    for part in path.split("."):
        config = getattr(config, part)
    if isinstance(config, tuple):
        return ",".join(str(v) for v in config)
    return str(config) if str(config) else "none"


def _metavar(hint: Any, name: str) -> str:
    if get_origin(hint) is Literal:
        return "|".join(str(v) for v in get_args(hint))
    return {int: "N", float: "X", Path: "PATH", Location: "PATH|URL"}.get(hint, name.upper())
