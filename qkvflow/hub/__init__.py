"""Hugging Face folders: import and export of models; transformers does not need qkvflow."""
