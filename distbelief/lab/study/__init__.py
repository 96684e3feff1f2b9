"""Studies: ways to train that run by the same rules, and figures and findings from their trials."""
