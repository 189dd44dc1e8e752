"""fortyfold from Python: what the package's public names do, and sinks beside training for the command line too."""
