"""Schedules: how an algorithm moves data between ranks, as data with a proof, a price and a drawing."""
