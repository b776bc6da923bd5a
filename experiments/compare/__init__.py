"""The comparison: six systems, several seeds, at the same number of steps, of FLOPs, and of parameters."""
