"""All uses of other libraries' internals: each in one place, with its reason. Contracts: tests/inside."""
