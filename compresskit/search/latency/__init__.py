"""Latency: what the operators of measured files took, and what that says of files that were not measured."""
