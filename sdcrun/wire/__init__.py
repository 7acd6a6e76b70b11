"""Client side of the control plane: stdlib and core only, shared by the shim (in the user's process) and the runner."""
