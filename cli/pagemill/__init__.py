"""The `pagemill` command."""
