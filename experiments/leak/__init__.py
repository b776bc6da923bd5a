"""The leak of the time-indexed fork, shown by running it; and its published statistics, recomputed from its losses."""
