"""What the training programs share: checks before work, the loop over steps, validation, stopping."""
