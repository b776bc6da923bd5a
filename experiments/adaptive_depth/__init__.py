"""Adaptive fine-tuning: a flow trained on one text and tuned on another at several depths, against an equal GPT-2."""
