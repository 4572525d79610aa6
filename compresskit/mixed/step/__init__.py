"""The optimizer step: fp32 masters, loss scaling, accumulation, flat and compiled updates."""
