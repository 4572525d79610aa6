"""By what a run recognizes its stages: digests of tensors; descriptions of settings, functions, data and tasks by value."""

from compresskit.base.fingerprint.describe import Description, describe, describe_by_value, short_hash
from compresskit.base.fingerprint.tasks import describe_task
from compresskit.base.fingerprint.tensors import array_digest, fingerprint

__all__ = ["Description", "array_digest", "describe", "describe_by_value", "describe_task", "fingerprint", "short_hash"]
