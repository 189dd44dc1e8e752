"""Training and evaluation in one process: the loop, the step, checkpoints, the journal, stopping."""
