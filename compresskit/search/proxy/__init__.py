"""Proxies: candidates are made without training, and judged by a part of the validation data."""
