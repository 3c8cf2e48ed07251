"""residua inside other people's programs: one optional module for each, imported where it is used."""
