"""Every decision lives here: pure functions and frozen data, standard library only, tested without a process."""
