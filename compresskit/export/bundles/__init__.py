"""Bundles: an ONNX file in a folder with all that is needed to run it elsewhere, in Python, in a browser and in C++."""
