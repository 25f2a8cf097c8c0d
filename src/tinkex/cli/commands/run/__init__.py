"""`tinkex run`: a module for each of its commands."""
