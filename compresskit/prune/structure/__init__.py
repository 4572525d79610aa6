"""Which channels belong together: trace a run, propagate channels, form groups, plan, prove."""
