"""`ludus view`: a local web page about a run."""
