"""Folders in the format of Hugging Face: models come in and go out, and transformers needs none of our code."""
