"""Export a student; the same as `qat-lora export`."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
