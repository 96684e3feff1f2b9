"""Schedules: how an algorithm moves data between ranks, itself as data; with a proof, a price and a drawing. No bytes
move here.
"""
