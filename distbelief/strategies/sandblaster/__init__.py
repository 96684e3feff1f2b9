"""Sandblaster: batch methods on vectors that shards hold (section 4.2 of the paper). Its coordinator sees scalars only;
no I/O in here.
"""
