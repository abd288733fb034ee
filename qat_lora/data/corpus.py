"""The embedded corpus: English documentation that every machine with Python already holds.

Owns: finding the standard library of the running interpreter; reading docstrings, block comments and
`pydoc_data/topics.py` out of its sources (parsed, never imported); and the split of its files into train and
eval. Does not own: tokenisation, fixed-length blocks, or other sources of text.

The unit of the split is the file, and its side is a pure function of the file's relative path; so no Python
version moves a file from one side to the other. A passage that stands on both sides belongs to train, and is
left out of eval.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from qat_lora.errors import DataError

Split = Literal["train", "eval"]

EVAL_PER_THOUSAND = 50  # with it the largest file, the help topics, is on the train side; a test keeps it there
TOPICS_PATH = "pydoc_data/topics.py"
INSTALLED_FOLDERS = ("site-packages", "dist-packages", "lib-dynload", "_bundled", "__pycache__")
TEST_FOLDERS = ("test", "tests", "idle_test", "turtledemo")
SKIPPED_FOLDERS = frozenset(INSTALLED_FOLDERS + TEST_FOLDERS)
MIN_FILES = 100
MIN_DOCUMENT_CHARS = 200
MIN_PASSAGE_CHARS = 24
MIN_PASSAGE_WORDS = 4
MIN_LETTER_SHARE = 0.5
MIN_SHARED_PARAGRAPH_CHARS = 40

_Passage = tuple[str, str]  # heading, which may be empty, and prose
# Strings are matched only so that a hash sign inside one is not taken for a comment; `tokenize` is slower.
_LONG_STRING = r"""'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\""""
_SHORT_STRING = r"""'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*\""""
_STRING_OR_COMMENT = re.compile(rf"{_LONG_STRING}|{_SHORT_STRING}|(?P<comment>#[^\n]*)", re.DOTALL)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def split_of(relative_path: str) -> Split:
    """Return the side of one file from nothing but its path inside the library ("json/decoder.py")."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % 1000 < EVAL_PER_THOUSAND else "train"


def corpus_texts(split: Split) -> Iterator[str]:
    """Yield the text of each file of one split, in the order of the files' paths."""
    return (text for _, text in corpus_documents(split))


def corpus_documents(split: Split) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) for each file of one split, in the order of the paths."""
    if split not in ("train", "eval"):
        raise DataError(f"The embedded corpus has no split {split!r}: ask for 'train' or 'eval'.")
    return iter(_documents(stdlib_folder())[split])


def stdlib_folder() -> Path:
    """Return the folder that holds the running interpreter's standard library sources."""
    return Path(sysconfig.get_path("stdlib"))


@cache
def _documents(folder: Path) -> dict[Split, tuple[tuple[str, str], ...]]:
    """Read the whole corpus once: train first, since what train holds is dropped from eval."""
    paths = _source_paths(folder)
    seen: set[str] = set()
    train = {path: _distinct(_passages(folder, path), seen) for path in paths if split_of(path) == "train"}
    taught = {words for passages in train.values() for _, prose in passages for words in _paragraphs(prose)}
    held_out: dict[str, list[_Passage]] = {}
    for path in paths:
        if split_of(path) == "eval":
            passages = _distinct(_passages(folder, path), seen)
            held_out[path] = [(name, prose) for name, prose in passages if taught.isdisjoint(_paragraphs(prose))]
    return {"train": _joined(train), "eval": _joined(held_out)}


def _source_paths(folder: Path) -> list[str]:
    """Return the relative paths of the source files that count, sorted: the same order everywhere."""
    paths = []
    for current, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [(Path(current) / name).relative_to(folder).as_posix() for name in names if name.endswith(".py")]
    if len(paths) < MIN_FILES:
        raise DataError(
            f"The embedded corpus needs the sources of Python's standard library, but {folder} holds "
            f"{len(paths)} usable .py files: run with a Python that ships them (python.org, pyenv, conda and "
            "system Pythons do)."
        )
    return sorted(paths)


def _passages(folder: Path, relative_path: str) -> Iterator[_Passage]:
    """Yield (heading, prose) for all there is to read in one file; a file that does not parse has nothing."""
    try:
        source = (folder / relative_path).read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in old sources are not ours to repair
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # ValueError: not UTF-8, or a null byte
        return
    if relative_path == TOPICS_PATH:
        yield from _topics(tree)
        return
    module = relative_path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield module, ast.get_docstring(tree) or ""
    yield from _docstrings(tree, prefix="")
    yield from (("", text) for text in _block_comments(source))


def _topics(tree: ast.Module) -> Iterator[_Passage]:
    """Yield (topic, text) from the dict literal that `help("topic")` reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield str(key.value), str(value.value)


def _docstrings(node: ast.AST, *, prefix: str) -> Iterator[_Passage]:
    """Yield (heading, docstring) of every class and function below a node, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = prefix + child.name
            yield name + _signature(child), ast.get_docstring(child) or ""
            yield from _docstrings(child, prefix=f"{name}.")
        else:
            yield from _docstrings(child, prefix=prefix)


def _signature(node: _Definition) -> str:
    """Return "(self, s)" for a function and "(Base)" for a class with bases."""
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    return f"({ast.unparse(node.args)})"


def _block_comments(source: str) -> Iterator[str]:
    """Yield each run of whole-line comments as one text without its hash signs."""
    block: list[str] = []
    block_end = 0
    for match in _STRING_OR_COMMENT.finditer(source):
        line_start = source.rfind("\n", 0, match.start()) + 1
        if match["comment"] is None or source[line_start : match.start()].strip():
            continue
        if source[block_end : match.start()].strip() or source.count("\n", block_end, match.start()) != 1:
            yield "\n".join(block)
            block = []
        block.append(re.sub(r"^#+:? ?", "", match["comment"]))
        block_end = match.end()
    yield "\n".join(block)


def _distinct(passages: Iterator[_Passage], seen: set[str]) -> list[_Passage]:
    """Tidy the passages, and drop those that are trivial or were seen before."""
    kept = []
    for heading, raw in passages:
        prose = _tidy(raw)
        key = " ".join(prose.split())
        if _is_prose(key) and key not in seen:
            seen.add(key)
            kept.append((heading, prose))
    return kept


def _tidy(text: str) -> str:
    """Trim line ends and squeeze runs of blank lines to one."""
    lines = "\n".join(line.rstrip() for line in text.expandtabs(8).splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _is_prose(text: str) -> bool:
    """Say whether a passage is long enough to teach anything, and words rather than rulers and numbers."""
    is_long = len(text) >= MIN_PASSAGE_CHARS and len(text.split()) >= MIN_PASSAGE_WORDS
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return is_long and letters >= MIN_LETTER_SHARE * len(text)


def _paragraphs(text: str) -> set[str]:
    """Return the paragraphs of a text, with spaces squeezed, that are too long to coincide by chance."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return {paragraph for paragraph in paragraphs if len(paragraph) >= MIN_SHARED_PARAGRAPH_CHARS}


def _joined(passages_by_path: dict[str, list[_Passage]]) -> tuple[tuple[str, str], ...]:
    """Make one text per file, leaving out the files that hold next to nothing."""
    texts = {
        path: "\n\n".join(f"{heading}\n{prose}".lstrip("\n") for heading, prose in passages)
        for path, passages in sorted(passages_by_path.items())
    }
    return tuple((path, text) for path, text in texts.items() if len(text) >= MIN_DOCUMENT_CHARS)
