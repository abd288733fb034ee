"""Train a quantised student; the same as `qat-lora qat`."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["qat", *sys.argv[1:]]))
