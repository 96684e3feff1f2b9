"""Records of a run: metrics, the run folder, checkpoints, the live view."""
