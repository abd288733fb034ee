"""Command-line flags, made from the config dataclasses, so that no script can disagree with another.

Every leaf field of a run becomes ``--its-name``, with the spellings in its metadata beside it; a quantisation scheme
is reached by ``--preset`` and ``--set scheme.mlp.bits=3``. Precedence, weakest first: preset, ``--config FILE``,
flags, ``--set``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from qat_lora.config import AnyRun, QatRun, presets
from qat_lora.config.cache import AnyCacheRun
from qat_lora.errors import ConfigError, did_you_mean
from qat_lora.settings import leaves, load_settings, override, override_text
from qat_lora.urls import Location

# The settings that --help shows, whichever command has them; --help-all shows the others too.
_COMMON = {
    *("preset", "model", "teacher", "checkpoint", "adapter_dir", "cache_dir", "data", "chat_template", "output"),
    *("seq_len", "packing", "store", "top_k", "max_rows", "max_steps", "batch_size", "accumulation_steps", "lr"),
    *("eval_every", "recovery_r", "build_batch_size", "eval_batch_size", "stride", "stage", "format", "device"),
    *("parts", "rows"),
}
_WITHOUT = {"recover": {"scale_lr_ratio"}}  # what would have no effect there

# What other tools call it, where spelling alone would lead to another flag.
_SYNONYMS = {
    **dict.fromkeys(("--steps", "--epochs", "--num-epochs", "--num-train-epochs", "--iters"), "--max-steps"),
    **dict.fromkeys(("--lora-r", "--lora-rank", "--r"), "--recovery-r"),
    **dict.fromkeys(("--gradient-accumulation-steps", "--grad-accum", "--grad-accumulation"), "--accumulation-steps"),
    **dict.fromkeys(("--dataset", "--text", "--corpus"), "--data"),
    **dict.fromkeys(("--bits", "--scheme", "--quant"), "--preset"),
    **dict.fromkeys(("--max-length", "--max-seq-len", "--context", "--block-size"), "--seq-len"),
    **dict.fromkeys(("--gpu", "--cuda"), "--device"),
    **dict.fromkeys(("--out", "--out-dir", "--output-dir", "-o"), "--output"),
    **{"--lora-alpha": "--recovery-alpha", "--lora-dropout": "--recovery-dropout", "--dtype-compute": "--dtype"},
    **{"--cache": "--cache-dir", "--base-model": "--model", "--student": "--checkpoint", "--temp": "--temperature"},
}


_FORMATTER = functools.partial(argparse.HelpFormatter, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, and whose help is short and shows the values that hold."""

    def __init__(self, **settings: Any) -> None:
        """No help of argparse's own: `--help` shows the flags that most runs need, `--help-all` every one."""
        super().__init__(**settings, add_help=False, formatter_class=_FORMATTER)
        self.run_class: type | None = None
        self.rare: list[argparse.Action] = []
        self._given: list[str] = []
        self.add_argument("-h", "--help", action=_Help, help="show this")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and remember what for the help."""
        self._given = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        words = message.split()
        if message.startswith("unrecognized arguments:"):
            known = [s for action in self._actions for s in action.option_strings]
            flag = words[2].split("=")[0]
            meant = _SYNONYMS.get(flag)
            hint = f" Did you mean {meant!r}?" if meant in known else did_you_mean(flag, known)
            raise ConfigError(f"flag {flag!r} is unknown to `{self.prog}`.{hint}")
        raise ConfigError(f"{message}; see `{self.prog} --help`.")

    def show_help(self, *, every_flag: bool) -> None:
        """Print the help with the values that a run with the other arguments would have."""
        held = self._held()
        texts = {action: action.help for action in self._actions}
        for action, text in texts.items():
            if action in self.rare and not every_flag:
                action.help = argparse.SUPPRESS
            elif "." in action.dest or action.dest in vars(held or object):
                value = _shown(held, action.dest) if held is not None and action.const is None else ""
                action.help = f"{text} [{value}]".replace("%", "%%") if value else text
        if self.rare and not every_flag:
            self.epilog = f"{len(self.rare)} more flags: --help-all"
        self.print_help()
        for action, text in texts.items():
            action.help = text

    def _held(self) -> Any:
        if self.run_class is None:
            return None
        others = [word for word in self._given if word not in ("-h", "--help", "--help-all")]
        try:
            args, _ = super().parse_known_args(others)
        except ConfigError:  # half a command line
            return self.run_class()
        return run_from(args, self.run_class)


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.show_help(every_flag=option_string == "--help-all")
        parser.exit()


def add_flags(parser: Parser, run_class: type[AnyRun | AnyCacheRun]) -> None:
    """Add a flag for every leaf of the run, grouped as its dataclasses are, and those of the launch where it trains."""
    parser.run_class = run_class
    parser.usage = "%(prog)s [FLAGS]" if run_class.command.count(" ") == 0 else None
    parser.add_argument("--help-all", action=_Help, help="show every flag")
    groups: dict[str, Any] = {}

    def add(group: str, *names: str, common: bool = False, **options: Any) -> None:
        if group not in groups:
            owner = get_type_hints(run_class).get(group)
            about = f": {owner.__doc__.splitlines()[0].rstrip('.')}" if owner else ""
            groups[group] = parser.add_argument_group(group + about)
        action = groups[group].add_argument(*dict.fromkeys(names), **options)
        if not common:
            parser.rare.append(action)

    found = leaves(run_class)
    add("run", "--config", "--settings", dest="config", metavar="FILE|PRESET", action="append", default=[], common=True,
        help="YAML or JSON file of settings, under the flags; a preset's name too")  # fmt: skip
    for path, (field, hint) in found.items():
        given = field.metadata
        if path.startswith("scheme.") or field.name in _WITHOUT.get(run_class.command, ()):
            continue
        text = given.get("help", "") + (": " + ", ".join(presets.SCHEMES) if path == "preset" else "")
        kind: dict[str, Any] = {"metavar": _metavar(hint, field.name)}
        if hint in (bool, bool | None):
            kind = {"action": argparse.BooleanOptionalAction}
        names = [f"--{field.name.replace('_', '-')}", *given.get("flags", ())]
        group = path.split(".")[0] if "." in path else "run"
        add(group, *names, common=field.name in _COMMON and group != "kd", dest=path, default=None, help=text, **kind)
    if (name := "place.device") in found:
        add("place", "--tpu", dest=name, action="store_const", const="tpu", help="short for --device tpu")
    if (name := "execution.gradient_checkpointing") in found:
        text = "short for --gradient-checkpointing off"
        add("execution", "--no-gradient-checkpointing", dest=name, action="store_const", const="off", help=text)
    if run_class.command in ("cache", "qat", "recover"):  # what ranks can share
        text = "TPU chips to use, a process for each; 0: as many as TPU_NUM_DEVICES says, or all of the host"
        add("place", "--num-chips", metavar="N", type=int, default=None, help=f"{text} [one, in this process]")
    if "loop.max_steps" in found:
        text = "continue from last.pt in --output; starts at the beginning where there is none"
        add("run", "--resume", action="store_true", help=text, common=True)
        text = "start anew, even where --output holds a run"
        add("run", "--from-scratch", action="store_true", help=text, common=True)
    add("run", "--set", metavar="KEY=VALUE", action="append", default=[], common=True,
        help="any setting by its dotted path; may be repeated")  # fmt: skip


def run_from(args: argparse.Namespace, run_class: type) -> AnyRun | AnyCacheRun:
    """Build the run that the flags describe; raises ConfigError at a value out of range or an unknown key."""
    given, run, chosen = vars(args), run_class(), ""
    files = [Path(name) for name in args.config if run_class is not QatRun or not _is_preset(name)]
    if run_class is QatRun:
        chosen = _preset_given(given)
        # without a flag it is the files' own: it must be known before anything else is laid over it
        run = presets.qat_run(chosen or functools.reduce(load_settings, files, run).preset)
    for path in files:
        run = load_settings(run, path)
        if chosen and run.preset != chosen:
            raise ConfigError(f"preset {chosen!r} contradicts preset {run.preset!r} in {path}; drop one of them.")
    for name in leaves(run_class):
        if given.get(name) is not None:
            run = override(run, name, given[name])
    for assignment in args.set:
        run = override_text(run, assignment)
    return run


def launch_of(args: argparse.Namespace) -> Any:
    """Return how a training command is launched: ``new``, ``resume`` or ``from_scratch``."""
    if args.resume and args.from_scratch:
        raise ConfigError("--resume continues a run and --from-scratch starts anew; give one of them.")
    return "resume" if args.resume else "from_scratch" if args.from_scratch else "new"


def _is_preset(name: str) -> bool:
    """Whether a value of --config is a preset's name, well written or not, and no file."""
    return name in presets.SCHEMES or (Path(name).suffix == "" and "/" not in name and not Path(name).exists())


def _preset_given(given: dict[str, Any]) -> str:
    """The preset named by --set, by its flag or by --config; empty where none does."""
    pairs = [assignment.partition("=") for assignment in given["set"]]
    by_set = [value.strip() for key, _, value in pairs if key.strip() == "preset"]
    named = [*filter(_is_preset, given["config"]), given["preset"], *by_set]
    return next(filter(None, reversed(named)), "")


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
