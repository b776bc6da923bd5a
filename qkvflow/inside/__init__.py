"""Where the inside of other libraries is touched: each place once, with its reason. Contracts: tests/inside."""
