"""Reports about runs: the data of run folders, and one self-contained HTML page."""
