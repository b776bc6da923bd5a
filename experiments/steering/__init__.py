"""Steering: a hybrid trained on two texts, told by its control which one it reads, and then asked for either."""
