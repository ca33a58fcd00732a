"""Tasks in the format of BFCL, with one turn, or with several turns on BFCL's API classes."""
