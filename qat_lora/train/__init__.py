"""Training: state, step, loop, hooks, checkpoints, and QAT and recovery as whole runs."""
