"""Train a quantised student on all TPU chips of this host, or on --num-chips of them; else as train_qat.py."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["qat", "--num-chips", "0", *sys.argv[1:]]))
