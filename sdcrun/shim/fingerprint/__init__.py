"""Fingerprints of tensors: 16 bytes that say whether two replicas hold the same bits (FP1, defined in `fp1`)."""

from sdcrun.shim.fingerprint.collector import Collector, fingerprint_bytes, fingerprints
from sdcrun.shim.fingerprint.compare import Difference, differing_words, digest, encode_metas, metadata
from sdcrun.shim.fingerprint.engines import implementation

__all__ = [
    "Collector",
    "Difference",
    "differing_words",
    "digest",
    "encode_metas",
    "fingerprint_bytes",
    "fingerprints",
    "implementation",
    "metadata",
]
