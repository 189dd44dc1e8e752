"""Ranks together: torchrun and what its workers report, and a pulse that tells which of them is missing."""
