"""Build a KD cache; the same as `qat-lora cache`."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["cache", *sys.argv[1:]]))
