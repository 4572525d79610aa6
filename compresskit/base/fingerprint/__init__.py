"""By what a run recognizes its stages: digests of tensors; descriptions of settings, functions and data by value."""

from compresskit.base.fingerprint.describe import Description, describe, describe_by_value, short_hash
from compresskit.base.fingerprint.tensors import array_digest, fingerprint

__all__ = ["Description", "array_digest", "describe", "describe_by_value", "fingerprint", "short_hash"]
