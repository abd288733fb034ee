"""Measure fidelity; the same as `qat-lora eval`."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
