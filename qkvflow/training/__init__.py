"""Shared by the training programs: checks before work, the loop over steps, validation, stopping."""
