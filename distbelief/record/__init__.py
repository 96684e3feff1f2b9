"""What a run leaves: metrics, the run folder, checkpoints, the live view."""
