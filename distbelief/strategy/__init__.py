"""Ways to train: what each strategy's options are and which roles play what."""
