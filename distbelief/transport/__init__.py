"""Carriers of bytes between roles: a file for each, and one page of promises."""
