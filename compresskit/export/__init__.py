"""ONNX files: written, proved against their model, and audited for what runs in integers."""

from compresskit.export.audit import Audit, audit
from compresskit.export.onnx import export_onnx
from compresskit.export.sparse import compressed_bytes, store_sparse
from compresskit.export.verify import Level, Verification, verify_onnx

__all__ = ["Audit", "Level", "Verification", "audit", "compressed_bytes", "export_onnx", "store_sparse", "verify_onnx"]
