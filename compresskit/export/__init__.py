"""ONNX files: write one, verify it against its model, audit which operators run in integers, benchmark files."""

from compresskit.export.bundles.bundle import bundle
from compresskit.export.bundles.preprocess import Preprocess
from compresskit.export.check.agreement import Agreement
from compresskit.export.check.audit import Audit, audit
from compresskit.export.check.benchmark import Timing, benchmark
from compresskit.export.check.levels import LevelVerification, verify_levels
from compresskit.export.check.profile.layers import Profile
from compresskit.export.check.verify import Verification, verify_onnx
from compresskit.export.files import annotate, read_metadata
from compresskit.export.onnx import export_onnx
from compresskit.export.rewrite.sparse import compressed_bytes, store_sparse

__all__ = [
    "Agreement",
    "Audit",
    "LevelVerification",
    "Preprocess",
    "Profile",
    "Timing",
    "Verification",
    "annotate",
    "audit",
    "benchmark",
    "bundle",
    "compressed_bytes",
    "export_onnx",
    "read_metadata",
    "store_sparse",
    "verify_levels",
    "verify_onnx",
]
