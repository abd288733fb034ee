#!/bin/sh
# Turns transparent hugepages on until the next reboot. TPU v5e and newer start, and load programs, much faster with them.
# Training tries the same at its start; where it may not, run this once per machine: sudo scripts/enable_hugepages.sh
set -eu
file=/sys/kernel/mm/transparent_hugepage/enabled
if [ ! -e "$file" ]; then
    echo "this kernel has no $file; nothing to do" >&2
    exit 0
fi
if [ ! -w "$file" ]; then
    echo "$file may not be written; run: sudo $0" >&2
    exit 1
fi
echo always > "$file"
echo "transparent hugepages: $(cat "$file")"
