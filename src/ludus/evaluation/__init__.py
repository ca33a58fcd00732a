"""Evaluation: pass@k, intervals, comparisons, and audits of environments."""
