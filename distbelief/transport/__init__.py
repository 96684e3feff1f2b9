"""How bytes travel between roles: one file for each carrier, and one page of promises."""
