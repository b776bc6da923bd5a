"""What `qkvflow eval` measures: losses at any depth, what is cheaper than the full model, benchmark tasks."""
