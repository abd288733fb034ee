"""The embedded corpus: two sides that never overlap, the same on every reading."""

from __future__ import annotations

import re
import sys

import pytest

from qat_lora.data import corpus
from qat_lora.data.corpus import corpus_documents, corpus_texts, split_of
from qat_lora.errors import DataError

PADDING_FILES = corpus.MIN_FILES
PROSE = "A sentence that is long enough to be kept and that names {} so that it is found nowhere else.\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A made-up standard library: enough files to be accepted, each with a docstring of its own."""
    for index in range(PADDING_FILES):
        (tmp_path / f"module{index}.py").write_text(f'"""{PROSE.format(f"module{index}") * 3}"""\n')
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: tmp_path)
    return tmp_path


def names_on(side: str, count: int) -> list[str]:
    return [name for name in (f"extra{i}.py" for i in range(1000)) if split_of(name) == side][:count]


def sentences(texts: list[str]) -> list[str]:
    found = (part for text in texts for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())))
    return [sentence for sentence in found if len(sentence) >= 40]


def test_the_split_of_a_file_is_frozen() -> None:
    assert {split_of(path) for path in ("json/decoder.py", "argparse.py", "_pydecimal.py")} == {"train"}
    assert {split_of(path) for path in ("turtle.py", "statistics.py", "dataclasses.py")} == {"eval"}
    assert split_of("pydoc_data/topics.py") == "train"


def test_about_one_file_in_twenty_is_held_out() -> None:
    sides = [split_of(f"package/module{i}.py") for i in range(4000)]
    assert 0.035 < sides.count("eval") / len(sides) < 0.065


def test_both_sides_hold_real_text_and_share_no_file() -> None:
    train, held_out = dict(corpus_documents("train")), dict(corpus_documents("eval"))
    assert not train.keys() & held_out.keys()
    assert sum(map(len, train.values())) > 2_000_000
    assert sum(map(len, held_out.values())) > 100_000
    assert all(len(text.strip()) >= 100 for text in [*train.values(), *held_out.values()])


def test_documents_come_in_the_order_of_their_paths_and_texts_follow_them() -> None:
    documents = list(corpus_documents("eval"))
    assert [path for path, _ in documents] == sorted(path for path, _ in documents)
    assert list(corpus_texts("eval")) == [text for _, text in documents]


def test_held_out_text_is_not_in_the_training_text() -> None:
    train, held_out = list(corpus_texts("train")), list(corpus_texts("eval"))
    paragraphs = {words for text in train for words in corpus._paragraphs(text)}
    assert not [words for text in held_out for words in corpus._paragraphs(text) if words in paragraphs]
    known, asked = set(sentences(train)), sentences(held_out)
    assert sum(sentence in known for sentence in asked) < 0.03 * len(asked)


def test_reading_twice_gives_the_same_text(library) -> None:
    assert corpus._documents.__wrapped__(library) == corpus._documents(library)


def test_a_hash_sign_inside_a_string_is_no_comment(library) -> None:
    name = names_on("train", 1)[0]
    code = f'a = \'it\\\'s # {PROSE.strip()}\'\nb = """\n# {PROSE}"""\n'
    (library / name).write_text(code + f"# Said in a comment: {PROSE}" * 3)
    assert dict(corpus_documents("train"))[name].count("A sentence that is long") == 3


def test_test_folders_and_installed_packages_are_not_read() -> None:
    paths = [path for side in ("train", "eval") for path, _ in corpus_documents(side)]
    assert not [path for path in paths if re.search(r"(^|/)(tests?|idle_test|site-packages|turtledemo)/", path)]


def test_headings_prose_and_comments_are_read_and_code_is_not(library) -> None:
    (library / names_on("train", 1)[0]).write_text(
        '"""Module prose that is long enough to keep."""\n'
        "# A comment that goes on\n# over two whole lines.\n"
        "class Outer(Base):\n"
        "    def inner(self, s, *, k=3) -> int:\n"
        '        """Method prose that is long enough to keep.\n\n        Indented on.\n        """\n'
        "        return secret_name  # trailing remark that is not read\n" + f"# {PROSE}" * 3
    )
    text = dict(corpus_documents("train"))[names_on("train", 1)[0]]
    assert text.startswith("extra0\nModule prose that is long enough to keep.\n\n")
    assert "Outer.inner(self, s, *, k=3)\nMethod prose that is long enough to keep.\n\nIndented on.\n\n" in text
    assert "A comment that goes on\nover two whole lines.\n\n" in text
    assert "secret_name" not in text and "trailing" not in text


def test_a_passage_seen_before_is_dropped_and_train_keeps_it(library) -> None:
    first, second = names_on("train", 2)
    held_out = names_on("eval", 1)[0]
    shared, own = PROSE.format("sharing") * 3, PROSE.format("owning") * 3
    for name in (first, second, held_out):
        (library / name).write_text(f'"""{shared}"""\ndef f():\n    """{own}{name}"""\n')
    train, held_out_texts = dict(corpus_documents("train")), dict(corpus_documents("eval"))
    assert "sharing" in train[first]
    assert "sharing" not in train[second]
    assert "sharing" not in held_out_texts[held_out]
    assert "owning" in held_out_texts[held_out]


def test_held_out_prose_is_dropped_when_one_of_its_paragraphs_is_taught_under_another_heading(
    library,
) -> None:
    taught, held_out = names_on("train", 1)[0], names_on("eval", 1)[0]
    common, alone = PROSE.format("common") * 3, PROSE.format("alone") * 3
    (library / taught).write_text(f'def f():\n    """{common}\n    Taught ending."""\n')
    (library / held_out).write_text(f'def g():\n    """{common}\n    Other end."""\ndef h():\n    """{alone}"""\n')
    assert "common" not in dict(corpus_documents("eval"))[held_out]
    assert "alone" in dict(corpus_documents("eval"))[held_out]


def test_help_topics_are_read_from_their_dict(library) -> None:
    (library / "pydoc_data").mkdir()
    (library / "pydoc_data" / "topics.py").write_text(f"topics = {{'assert': {PROSE.format('topic') * 3!r}}}\n")
    assert dict(corpus_documents("train"))["pydoc_data/topics.py"].startswith("assert\nA sentence that is")


@pytest.mark.parametrize("content", [b"def broken(:\n", b'"""caf\xe9"""\n', b"x = 1\0\n"])
def test_a_file_that_does_not_parse_is_passed_over(library, content) -> None:
    name = names_on("train", 1)[0]
    (library / name).write_bytes(content)
    assert name not in dict(corpus_documents("train"))


def test_nearly_empty_files_are_left_out(library) -> None:
    name = names_on("train", 1)[0]
    (library / name).write_text('"""One short docstring and nothing more."""\n')
    assert name not in dict(corpus_documents("train"))


def test_a_python_without_sources_is_refused_in_one_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path} holds 0 usable .py files: run with a Python that ships them"):
        corpus_texts("train")


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'test': ask for 'train' or 'eval'"):
        corpus_documents("test")  # type: ignore[arg-type]


def test_reading_the_corpus_imports_none_of_what_it_reads(library) -> None:
    name = names_on("train", 1)[0]
    (library / name).write_text(f'"""{PROSE * 3}"""\nraise SystemExit("imported")\n')
    assert name in dict(corpus_documents("train"))
    assert name.removesuffix(".py") not in sys.modules
