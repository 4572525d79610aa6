"""ONNX files: written, proved against their model, audited for what runs in integers, timed against one another."""

from compresskit.export.check.audit import Audit, audit
from compresskit.export.check.benchmark import Timing, benchmark
from compresskit.export.check.levels import Levels, verify_levels
from compresskit.export.check.verify import Level, Verification, verify_onnx
from compresskit.export.files import annotate, read_metadata
from compresskit.export.onnx import export_onnx
from compresskit.export.rewrite.sparse import compressed_bytes, store_sparse

__all__ = [
    "Audit",
    "Level",
    "Levels",
    "Timing",
    "Verification",
    "annotate",
    "audit",
    "benchmark",
    "compressed_bytes",
    "export_onnx",
    "read_metadata",
    "store_sparse",
    "verify_levels",
    "verify_onnx",
]
