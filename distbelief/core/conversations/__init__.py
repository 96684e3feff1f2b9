"""The conversations between roles: one file for each, with its messages and who may say them to whom."""
