"""Models from compressed files: plain, or so that what was pruned and shared stays so."""
