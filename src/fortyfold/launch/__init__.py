"""Puts runs of several ranks on machines, and starts them again when ranks are lost. Imports no torch."""
