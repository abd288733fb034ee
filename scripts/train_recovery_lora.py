"""Train recovery adapters; the same as `qat-lora recover`."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["recover", *sys.argv[1:]]))
