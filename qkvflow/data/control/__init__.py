"""Control in data: from the field of a record, through the token cache, to the control of each token of a sequence."""
