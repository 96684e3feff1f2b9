"""Predictions: what trained models answer to samples, computed by several processes of this machine."""
