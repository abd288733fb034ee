"""Frozen dataclasses as settings: check, override by ``a.b=value``, read from and write to JSON.

Generic over the dataclass: the runs themselves are declared in `qat_lora.config`. Loads neither torch nor files other
than the settings file it is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from qat_lora.errors import ConfigError, did_you_mean, first_line
from qat_lora.urls import Location, Url, is_remote, location

T = TypeVar("T")
# What others call a value, where spelling alone would lead to another one.
_SYNONYMS = {"gpu": "cuda", "xla": "tpu", "metal": "mps", "float32": "fp32", "bfloat16": "bf16", "half": "bf16"}


def setting(
    default: Any,
    help: str,
    *flags: str,
    above: float | None = None,
    at_least: float = 0,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with its help text, further spellings of its flag, and the bounds of a number."""
    bounds = {"greater than": above, "at least": at_least, "below": below, "at most": at_most}
    return dataclasses.field(default=default, metadata={"help": help, "flags": flags, "bounds": bounds})


_HOLDS = {"greater than": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}


class Settings:
    """Base of frozen dataclasses that checks the words and the bounds of their fields (NaN is within no bounds).

    Raises:
        ConfigError: a Literal field holds a word that its type does not list, or a number is out of bounds.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, f.name), hints[f.name]
            if get_origin(hint) is Literal and value not in (known := get_args(hint)):
                meant = _SYNONYMS.get(str(value).lower())
                fix = f" Did you mean {meant!r}?" if meant in known else did_you_mean(str(value), known)
                raise ConfigError(f"{f.name}={str(value)!r} is unknown.{fix}")
            for words, bound in f.metadata.get("bounds", {}).items() if hint in (int, float) else ():
                if bound is not None and not (_HOLDS[words](value, bound) and math.isfinite(value)):
                    raise ConfigError(
                        f"{f.name} must be {words} {bound:g}, but {f.name}={value}; set --{f.name.replace('_', '-')} "
                        "accordingly."
                    )


def check_types(config: Any) -> None:
    """Raise ConfigError where a field of a dataclass is not of its type: no bool is a number, and floats are finite."""
    for name, hint in get_type_hints(type(config)).items():
        if not _is_of(hint, value := getattr(config, name)):
            known = ", ".join(get_args(hint)) if get_origin(hint) is Literal else ""
            wanted = f"choose one of {known}" if known else f"it takes {_WORDS.get(hint, 'a list of numbers')}"
            raise ConfigError(f"{name}={value!r:.80} is unknown; {wanted}.")


_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


def _is_of(hint: Any, value: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in inner
    if kind is types.UnionType:
        return any(_is_of(each, value) for each in inner)
    if kind is tuple:
        return isinstance(value, tuple) and all(_is_of(inner[0], each) for each in value)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


class Leaf(NamedTuple):
    """One setting: its dataclass field and its type."""

    field: dataclasses.Field[Any]
    hint: Any


def leaves(config_class: type, prefix: str = "") -> dict[str, Leaf]:
    """Map the dotted path of every leaf field, e.g. ``loop.batch_size``, to its field and type."""
    hints = get_type_hints(config_class)
    found: dict[str, Leaf] = {}
    for f in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[f.name]):
            found |= leaves(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = Leaf(f, hints[f.name])
    return found


def override(config: T, path: str, value: Any) -> T:
    """Return a copy of the config with the field at the dotted path set; text is read by the field's type."""
    return _override(config, path.split("."), value, path)


def override_text(config: T, assignment: str) -> T:
    """Apply one ``a.b=value``, as given to --set."""
    path, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--set takes key=value, but got {assignment!r}; write for example --set optim.lr=1e-3.")
    return override(config, path.strip(), value.strip())


def parse_value(hint: Any, value: Any, name: str) -> Any:
    """Read a value, often text from a command line or JSON, as the type of the field it is meant for."""
    if get_origin(hint) is tuple:
        items = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{name} takes a list, but got {value!r}; write it as a, b.")
        return tuple(parse_value(get_args(hint)[0], item, name) for item in items)
    if hint in (str, Path, Location) or get_origin(hint) is Literal:
        if not isinstance(value, str | Path | Url):
            raise ConfigError(f"{name} takes text, but got {value!r}; put it in quotes or drop it.")
        if hint is Path and is_remote(value):
            raise ConfigError(f"{name} takes a folder of this machine, but got {str(value)!r}; only caches have URLs.")
        return Path(str(value)) if hint is Path else location(value) if hint == Location else str(value)
    if hint == bool | None:
        return None if value in (None, "auto") else parse_value(bool, value, name)
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() not in words:
            raise ConfigError(f"{name} takes true or false, but got {value!r}; write {name}=true.")
        return words[str(value).lower()]
    return _number(hint, value, name)


def _number(hint: Any, value: Any, name: str) -> Any:
    kind = "a whole number" if hint is int else "a number"
    try:
        number = hint(value)
        if isinstance(value, bool) or (isinstance(value, float) and number != value == value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} takes {kind}, but got {value!r}; correct the value.") from None
    return number


def to_json(config: Any) -> dict[str, Any]:
    """Return the config as a tree of JSON types."""
    tree = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {k: _plain(v) for k, v in tree.items()}


def from_json(config_class: type[T], tree: dict[str, Any]) -> T:
    """Build a config from the tree that `to_json` wrote; raises ConfigError at an unknown key."""
    hints = get_type_hints(config_class)
    names = {f.name for f in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in names:
            raise ConfigError(f"key {key!r} is not a setting of {config_class.__name__}.{did_you_mean(key, names)}")
        nested = dataclasses.is_dataclass(hints[key])
        values[key] = from_json(hints[key], value) if nested else parse_value(hints[key], value, key)
    return config_class(**values)


def load_settings(config: T, path: Path) -> T:
    """Lay a JSON or YAML file of (part of) a run's settings over a config."""
    if not path.is_file():
        raise ConfigError(f"settings file {path} does not exist; give --config an existing .yaml or .json file.")
    import yaml

    try:
        tree = (yaml.safe_load if path.suffix in (".yaml", ".yml") else json.loads)(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {first_line(error)}; correct it.") from None
    if isinstance(tree, dict) and {"command", "config"} <= tree.keys():  # the run.json of an earlier run
        tree = tree["config"]
    for dotted, value in _flatten(tree).items():
        config = override(config, dotted, value)
    return config


def _override(config: Any, parts: list[str], value: Any, path: str) -> Any:
    head, rest = parts[0], parts[1:]
    names = {f.name for f in dataclasses.fields(config)}
    if head not in names:
        place = type(config).__name__
        raise ConfigError(
            f"override key {path!r} is not a setting: {place} has no {head!r}.{did_you_mean(head, names)}"
        )
    child = getattr(config, head)
    if dataclasses.is_dataclass(child) != bool(rest):
        inner = ", ".join(f.name for f in dataclasses.fields(child)) if dataclasses.is_dataclass(child) else ""
        fix = f"name one of its settings: {inner}" if inner else f"drop .{'.'.join(rest)}"
        raise ConfigError(f"override key {path!r} does not end at a single setting; {fix}.")
    if rest:
        return dataclasses.replace(config, **{head: _override(child, rest, value, path)})
    hint = get_type_hints(type(config))[head]
    return dataclasses.replace(config, **{head: parse_value(hint, value, path)})


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ConfigError(f"settings must be a mapping of names to values, but {prefix or 'the file'} holds {tree!r}.")
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path | Url) else value
