"""How the rows of a text source are read, as a group of settings that every run with a text shares.

Owns the dataclass and what of it can be checked alone. Which source it is, and what is done with its rows, the run
says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.settings import Settings, setting

DataFormat = Literal["auto", "text", "alpaca", "sharegpt", "messages"]
ChatTemplate = Literal["none", "no-think", "think", "both"]


@dataclass(frozen=True)
class SourceConfig(Settings):
    """How the rows of a text source are read."""

    data_format: DataFormat = setting(
        "auto",
        "what a row of .jsonl or hf: holds: text (under text or content), alpaca (instruction, input, output), "
        "sharegpt (conversations of from and value), messages (of role and content); auto: as its keys say",
    )
    chat_template: ChatTemplate = setting(
        "none",
        "chats become text by the tokenizer's chat template: no-think without reasoning, think as they are, both gives "
        "two texts; none: the messages with empty lines between",
    )
    streaming: bool = setting(False, "hf: read rows over the network as they are needed, without downloading the whole")
    shuffle_buffer: int = setting(0, "shuffle rows, each drawn at random from a buffer of so many; 0 keeps their order")
    data_seed: int = setting(0, "seed of --shuffle-buffer", below=2**32)  # what a NumPy seed can hold
