"""Numbers from a run directory's records and events. Imports no torch."""
