"""Number formats of training: precision policies, apex levels, bf16 variants, fp8, TF32, casts, DDP and FSDP2."""
