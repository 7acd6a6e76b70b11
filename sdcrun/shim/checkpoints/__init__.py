"""Checkpoints in the user's process: what is in a save, whether it is what the ranks agree on, and the file's side."""
