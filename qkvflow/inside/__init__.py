"""Internals of other libraries, and what these leave unchecked, each in one place. Contracts: tests/inside."""
