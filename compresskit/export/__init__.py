"""ONNX files: written, proved against their model, and audited for what runs in integers."""

from compresskit.export.audit import Audit, audit
from compresskit.export.onnx import export_onnx
from compresskit.export.verify import Level, Verification, verify_onnx

__all__ = ["Audit", "Level", "Verification", "audit", "export_onnx", "verify_onnx"]
