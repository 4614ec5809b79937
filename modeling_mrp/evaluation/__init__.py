"""Evaluation with the lm-evaluation-harness: model class `mrp`, launcher `mrp-eval`, likelihood, sweeps."""
