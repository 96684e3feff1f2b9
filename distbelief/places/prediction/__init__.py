"""Predictions: outputs of trained models for samples, computed by several processes of this machine."""
