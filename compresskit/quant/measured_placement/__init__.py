"""Placement by measured times: leave in float what is faster in float on this machine."""
