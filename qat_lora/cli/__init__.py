"""The command line: `qat-lora` and what the scripts call."""
