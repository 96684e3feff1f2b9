"""The mutants, in one file for each area of the code."""
