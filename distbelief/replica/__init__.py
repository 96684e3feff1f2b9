"""The stories of those who compute. They yield effects and do no I/O."""
