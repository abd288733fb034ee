"""The only door to torch_xla: one device, a process for each chip, one program for all chips."""
