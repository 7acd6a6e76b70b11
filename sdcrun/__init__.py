"""sdcrun: torchrun that notices silent data corruption. Imports nothing, so that every process can afford it."""

__version__ = "0.1.0"
