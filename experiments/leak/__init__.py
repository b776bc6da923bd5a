"""The leak in the time-indexed fork, demonstrated; and its published statistics, recomputed from its losses."""
