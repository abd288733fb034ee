"""Train recovery adapters on all TPU chips of this host, or on --num-chips of them; else as train_recovery_lora.py."""

import sys

from qat_lora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["recover", "--num-chips", "0", *sys.argv[1:]]))
