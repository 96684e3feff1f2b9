"""Stories of replicas and of the evaluator, which yield effects and do no I/O."""
