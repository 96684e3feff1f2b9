"""The conversations between roles: one file for each, with its messages and who may send them to whom."""
