"""Which kernels run a file, for how long, and of which layers they are."""
