"""ONNX files: written, proved against their model, audited for what runs in integers, timed against one another."""

from compresskit.export.audit import Audit, audit
from compresskit.export.bench import Timing, benchmark
from compresskit.export.files import annotate, read_metadata
from compresskit.export.levels import Levels, verify_levels
from compresskit.export.onnx import export_onnx
from compresskit.export.sparse import compressed_bytes, store_sparse
from compresskit.export.verify import Level, Verification, verify_onnx

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
