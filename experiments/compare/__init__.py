"""The comparison: six systems, several seeds, at equal numbers of steps, FLOPs and parameters."""
