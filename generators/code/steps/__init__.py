"""The pieces that programs are made of: typed functions whose docstrings say what they do."""
