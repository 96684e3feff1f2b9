"""Carriers of bytes between roles: a file for each, and one with the promises of all."""
