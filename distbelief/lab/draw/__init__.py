"""Drawings of schedules and of split models."""
