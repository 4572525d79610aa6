"""Number formats: precision policies, apex levels, bf16 variants, FP8, TF32, casts and parallel wrappers."""
