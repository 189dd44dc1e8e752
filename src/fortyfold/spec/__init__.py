"""What a run is, in plain data: recipe, timeline, records, run directory. Imports no torch."""
