"""Judges projectors: the arms, the evaluator, the report."""
