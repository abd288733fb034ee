"""Rows of data sets on a hub, or of whatever else `datasets` loads by one name.

The only file that imports `datasets`. Owns the spec `hf:dataset[:config][:split]`, streaming, and the errors of both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qat_lora.config.source import SourceConfig
from qat_lora.data.paths import HUB_PREFIX
from qat_lora.errors import DataError, first_line

logger = logging.getLogger(__name__)


def hub_rows(spec: str, config: SourceConfig, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set, with those of `columns` that it has, as they are asked for.

    A stream is shuffled here, by `datasets` itself, which also shuffles the order of the files; what is on disk is not.

    Raises:
        DataError: no `datasets`, no such data set, none of the columns, or reading broke off.
    """
    rows = load_dataset(spec, streaming=config.streaming)
    names = rows.column_names  # of a stream they may be unknown
    if names is not None:
        known = [key for key in columns if key in names]
        if not known:
            raise DataError(
                f"The dataset {spec!r} has the columns {names}, but none of {', '.join(columns)}; choose another "
                "dataset or convert it to .jsonl."
            )
        rows = rows.select_columns(known)
    if config.streaming and config.shuffle_buffer:
        rows = rows.shuffle(seed=config.data_seed, buffer_size=config.shuffle_buffer)
    count = 0
    try:
        for row in rows:
            yield row
            count += 1
    except _errors() as error:
        raise DataError(
            f"Reading {spec!r} broke off after {count} rows ({first_line(error, 400)}); check the network and run the "
            "command again, or use local files."
        ) from error


def load_dataset(spec: str, *, streaming: bool) -> Any:
    """Open a data set; without `streaming` it is then on the local disk, where others of this machine find it."""
    # At most three parts: the split may hold a colon of its own, as in train[:1%].
    name, config, split = [*spec.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    if not name:
        raise DataError(
            f"The source {spec!r} is malformed; write hf:dataset, hf:dataset:config or hf:dataset:config:split."
        )
    split = split or "train"
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"The source {spec!r} needs the package 'datasets'; pip install 'qat_lora[hf]' or use local files."
        ) from error
    logger.info("reading %s (config %s, split %s%s)", name, config or None, split, ", streaming" if streaming else "")
    try:
        # No network and no such dataset are OSErrors; no such config or split are ValueErrors.
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except _errors() as error:
        raise DataError(
            f"Cannot load {spec!r} ({first_line(error, 400)}); check dataset, config, split and network, or use local "
            "files."
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    import datasets

    return OSError, ValueError, datasets.exceptions.DatasetsError
