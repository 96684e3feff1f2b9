"""Schedules: how an algorithm moves what ranks hold, as data; with a proof, a price and a drawing. Nothing here moves a
byte.
"""
