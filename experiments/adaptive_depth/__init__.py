"""Adaptive fine-tuning: a flow trained on one text, tuned on another at several depths, beside a GPT-2 of its size."""
