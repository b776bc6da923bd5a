"""Control in data: from a record's field, through the token cache, to the control of each token of a sequence."""
