"""Steering: a hybrid trained on two texts, with a control that identifies the text, then used to generate either."""
